# SPDX-License-Identifier: Apache-2.0
"""Tests of one engine run together, and it ends with the last of them; fake tests and servers."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from tests.engine.sharing import SharedServer, in_order

PLAIN, LITTLE, OTHER_MODEL = ("tiny-llama",), ("tiny-llama", "--little"), ("tiny-qwen3",)


@dataclass(eq=False)
class Item:
    """A collected test of a file that needs an engine, or none."""

    file: str
    engine: tuple[str, ...] | None
    ends_it: bool = False

    @property
    def fixturenames(self) -> list[str]:
        fixture = "mortal" if self.ends_it else "server"
        return ["text", *([fixture, "shared_engine"] if self.engine else [])]

    @property
    def callspec(self) -> Any:
        return SimpleNamespace(params={"model": self.engine[0]} if self.engine != LITTLE else {})

    def get_closest_marker(self, name: str) -> Any:
        assert name == "serve_with"
        return SimpleNamespace(args=self.engine[1:]) if self.engine[1:] else None


def test_tests_of_one_engine_run_together():
    collected = (("a", None), ("a", LITTLE), ("b", PLAIN, True), ("b", OTHER_MODEL), ("b", None), ("c", PLAIN))
    assert [(item.file, item.engine) for item in in_order([Item(*each) for each in collected])] == [
        *(("c", PLAIN), ("b", PLAIN), ("a", LITTLE), ("b", OTHER_MODEL)),
        *(("a", None), ("b", None)),
    ]


class Server:
    def __init__(self, engine):
        self.engine = engine

    def end(self):
        self.engine = "stopped"


def test_an_engine_ends_with_its_last_test_and_another_replaces_it():
    server, alive = SharedServer(Server), []
    for engine, following in ((PLAIN, PLAIN), (PLAIN, LITTLE), (LITTLE, None), (None, PLAIN), (PLAIN, None)):
        if engine is not None:
            assert server.get(engine) is server.get(engine)
        server.keep(following)
        alive.append([each.engine for each in server.running()])
    assert alive == [[PLAIN], [], [], [], []]
    first = server.get(PLAIN)
    assert server.get(LITTLE).engine == LITTLE
    assert first.engine == "stopped"
    taken = server.take(LITTLE)
    assert (taken.engine, server.running()) == (LITTLE, [])
    assert server.get(LITTLE) is not taken


@pytest.mark.xdist_group("grouped")
def test_the_scheduler_is_told_of_groups(request):
    if getattr(request.config.option, "loadgroup", False):
        assert request.node.nodeid.endswith("@grouped")
