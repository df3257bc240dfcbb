# SPDX-License-Identifier: Apache-2.0
"""Engines shared by tests: the engine that a test needs, the order of the tests, and the engines still needed.

A test with the fixture `server` gets the engine of its parameter `model` and of its marker `serve_with(*flags)`.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Sequence
from pathlib import Path

import pytest

from tests.engine.server import TesseraServer

Engine = tuple[str, ...]
"""A preset model, and flags of `tessera serve`."""

SMALL_STEPS = pytest.mark.serve_with("--max-num-batched-tokens", "64", "--max-num-seqs", "8")
"""Prefills take many engine steps of 64 tokens."""


def engine_of(item: pytest.Item) -> Engine | None:
    """The shared engine of a test; `None` for a test without one."""
    if "shared_engine" not in getattr(item, "fixturenames", ()):
        return None
    call = getattr(item, "callspec", None)
    marker = item.get_closest_marker("serve_with")
    return (call.params.get("model", "tiny-llama") if call else "tiny-llama", *(marker.args if marker else ()))


def in_order(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Files that share an engine with another file first; within a file, the tests of an engine together."""
    files: defaultdict[Engine | None, set[Path]] = defaultdict(set)
    first: dict[Hashable, int] = {}
    for number, item in enumerate(items):
        files[engine_of(item)].add(item.path)
        first.setdefault(item.path, number)
        first.setdefault((item.path, engine_of(item) or item), number)
    sharing = {path for engine, paths in files.items() if engine and len(paths) > 1 for path in paths}
    return sorted(
        items,
        key=lambda item: (item.path not in sharing, first[item.path], first[item.path, engine_of(item) or item]),
    )


def needed_from(item: pytest.Item | None) -> set[Engine | None]:
    """The engines of a test and of all tests after it; none after the last test.

    With pytest-xdist, another process may run some of them: an engine then lives longer than it has to.
    """
    if item is None:
        return set()
    items = item.session.items
    return {engine_of(each) for each in items[items.index(item) :]}


class SharedServers:
    """Starts the server of an engine on demand; it runs until no test needs it."""

    def __init__(self, start: Callable[[Engine], TesseraServer]) -> None:
        self._start = start
        self._running: dict[Engine, TesseraServer] = {}

    def get(self, engine: Engine) -> TesseraServer:
        if engine not in self._running:
            self._running[engine] = self._start(engine)
        return self._running[engine]

    def running(self) -> list[TesseraServer]:
        return list(self._running.values())

    def end_all_but(self, needed: Collection[Engine | None]) -> None:
        for engine in self._running.keys() - set(needed):
            self._running.pop(engine).stop()
