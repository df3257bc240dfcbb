# SPDX-License-Identifier: Apache-2.0
"""The workload `placement`: four servers of its own, asked in turn, and what is refused."""

from contextlib import ExitStack
from pathlib import Path

import pytest

from measuring.speed import servers
from measuring.speed.answers import DifferentAnswerError
from measuring.speed.workloads import placement
from measuring.speed.workloads.base import Options
from measuring.speed.workloads.placement import Placement
from tests.measuring.helpers import ROUNDS, Fakes, run


class PlacedFakes(Fakes):
    """Servers that place chunks as their flags say, or as ``placed`` does."""

    def __init__(self, stack):
        super().__init__(stack)
        self.placed = {}

    def start(self, name, model, flags, folder, *, is_stock):
        placement = self.placed.get(name, flags[-1])
        extra = {"placement": placement} if placement in ("in-place", "attend") else {}
        self.state = {"report": lambda report: {**report, **extra}}
        return super().start(name, model, flags, folder, is_stock=is_stock)


@pytest.fixture
def fakes(monkeypatch):
    sizes = {"_CHUNKS": 2, "_REQUESTS_ALONE": 2, "_REQUESTS": 6}
    for name, size in sizes.items():
        monkeypatch.setattr(placement, name, size)
    for name, size in {"clients": 4, "output_tokens": 3}.items():
        monkeypatch.setattr(Placement, name, size)
    with ExitStack() as stack:
        fakes = PlacedFakes(stack)
        monkeypatch.setattr(servers, "running", fakes.start)
        monkeypatch.setattr(servers, "SETTLE_S", 0)
        yield fakes


def make() -> Placement:
    return Placement(Options(Path("model"), (), Path("out")))


async def test_every_round_has_samples_of_each_system(fakes):
    samples = await run(make())
    wanted = [
        (point, number, system)
        for point in ("one client", "4 clients")
        for number in range(1, 1 + ROUNDS)
        for system in ("stock", "warm", "in place", "attend")
    ]
    assert sorted((each.point, each.round, each.system) for each in samples) == sorted(wanted)
    assert all(value > 0 for each in samples for value in each.values.values())
    assert fakes.running == set()


async def test_all_servers_have_the_same_little_memory(fakes):
    await run(make())
    assert set(fakes.flags) == {"stock", "tessera", "in-place", "attend"}
    memory = fakes.flags["stock"]
    blocks = int(memory[memory.index("--num-gpu-blocks-override") + 1])
    assert 3 * (64 + 2 * 512 + 32 + 3) < 32 * blocks < 4 * (64 + 2 * 512 + 32 + 3)
    assert all(flags[: len(memory)] == memory for flags in fakes.flags.values())


@pytest.mark.parametrize(("name", "placed"), [("tessera", "in-place"), ("in-place", "copy"), ("attend", "copy")])
async def test_a_request_that_was_placed_otherwise_is_not_reported(name, placed, fakes):
    fakes.placed[name] = placed
    with pytest.raises(DifferentAnswerError, match="was placed as"):
        await run(make())
