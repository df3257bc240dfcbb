# SPDX-License-Identifier: Apache-2.0
"""Tests of one engine run together, and it ends with the last of them; fake tests and servers."""

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.engine.sharing import SharedServers, engine_of, in_order, needed_from

PLAIN, LITTLE, OTHER_MODEL = ("tiny-llama",), ("tiny-llama", "--little"), ("tiny-qwen3",)


@dataclass(eq=False)
class Item:
    """A collected test of a file that needs an engine, or none."""

    file: str
    engine: tuple[str, ...] | None
    session: Any = field(default_factory=SimpleNamespace)

    @property
    def path(self) -> Path:
        return Path(self.file)

    @property
    def fixturenames(self) -> list[str]:
        return ["text", *(["server", "shared_engine"] if self.engine else [])]

    @property
    def callspec(self) -> Any:
        return SimpleNamespace(params={"model": self.engine[0]} if self.engine != LITTLE else {})

    def get_closest_marker(self, name: str) -> Any:
        assert name == "serve_with"
        return SimpleNamespace(args=self.engine[1:]) if self.engine[1:] else None


def collected(*tests: tuple[str, tuple[str, ...] | None]) -> list[Item]:
    session = SimpleNamespace()
    session.items = [Item(file, engine, session) for file, engine in tests]
    return session.items


@pytest.mark.parametrize("engine", [None, PLAIN, LITTLE, OTHER_MODEL])
def test_a_test_names_its_engine(engine):
    assert engine_of(Item("a", engine)) == engine


def test_tests_of_one_engine_run_together_and_no_file_is_torn_apart():
    items = collected(("a", LITTLE), ("b", PLAIN), ("b", None), ("b", OTHER_MODEL), ("b", PLAIN), ("c", PLAIN))
    assert [(item.file, item.engine) for item in in_order(items)] == [
        *(("b", PLAIN), ("b", PLAIN), ("b", None), ("b", OTHER_MODEL), ("c", PLAIN)),
        ("a", LITTLE),
    ]


class Server:
    def __init__(self, engine):
        self.engine = engine

    def stop(self):
        self.engine = "stopped"


def test_an_engine_ends_with_its_last_test():
    items = collected(("a", PLAIN), ("a", LITTLE), ("b", None), ("b", PLAIN), ("c", None))
    servers, alive = SharedServers(Server), []
    for item, following in zip(items, [*items[1:], None], strict=True):
        if (engine := engine_of(item)) is not None:
            assert servers.get(engine) is servers.get(engine)
        servers.end_all_but(needed_from(following))
        alive.append([server.engine for server in servers.running()])
    assert alive == [[PLAIN], [PLAIN], [PLAIN], [], []]


def test_none_is_left_at_the_end():
    servers = SharedServers(Server)
    server = servers.get(PLAIN)
    servers.end_all_but(needed_from(None))
    assert (server.engine, servers.running()) == ("stopped", [])
