# SPDX-License-Identifier: Apache-2.0
"""Engines shared by tests, one at a time: the engine that a test needs, and the order of the tests.

A test with the fixture `server` gets the engine of its parameter `model` and of its marker `serve_with(*flags)`; one
with `mortal` gets it last, and ends it.
"""

from collections import Counter
from collections.abc import Callable, Sequence

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
    """The tests of an engine together, last the one that ends it, and those of the engine with most tests first.

    Tests without an engine are last.
    """
    number = Counter(engine_of(item) for item in items)
    first = {engine_of(item): place for place, item in reversed(list(enumerate(items)))}

    def place(item: pytest.Item) -> tuple[bool, int, int, bool]:
        engine = engine_of(item)
        if engine is None:
            return True, 0, 0, False
        return False, -number[engine], first[engine], "mortal" in getattr(item, "fixturenames", ())

    return sorted(items, key=place)


class SharedServer:
    """The running server of one engine, started on demand."""

    def __init__(self, start: Callable[[Engine], TesseraServer]) -> None:
        self._start = start
        self._engine: Engine | None = None
        self._server: TesseraServer | None = None

    def get(self, engine: Engine) -> TesseraServer:
        """The running server of ``engine``; starts it, and ends that of another engine."""
        self.keep(engine)
        if self._server is None:
            self._engine, self._server = engine, self._start(engine)
        return self._server

    def take(self, engine: Engine) -> TesseraServer:
        """As :meth:`get`, for a caller that ends it: the next one gets another server."""
        server = self.get(engine)
        self._engine = self._server = None
        return server

    def running(self) -> list[TesseraServer]:
        return [self._server] if self._server is not None else []

    def keep(self, engine: Engine | None) -> None:
        """Ends the server unless it is that of ``engine``, which the next test needs."""
        if self._server is not None and engine != self._engine:
            server, self._engine, self._server = self._server, None, None
            server.end()
