# SPDX-License-Identifier: Apache-2.0
"""How many rounds a workload gets."""

import itertools

import pytest

from measuring.speed import rounds
from measuring.speed.monitor import Monitor
from measuring.speed.rounds import measure
from measuring.speed.samples import Ratio, Sample
from measuring.speed.verdicts import LEAST_ROUNDS, evaluate
from measuring.speed.workloads.base import Workload

CLAIM = Ratio("w", "p", "ttft_s", "stock", "warm", at_least=2.0)


class Steps(Workload):
    """Ratios from a list, again and again; each round takes a minute of ``clock``."""

    name, title, axis = "w", "a workload", "point"

    def __init__(self, clock, ratios, claims=(CLAIM,)):
        self.clock, self.ratios, self.of = clock, itertools.cycle(ratios), list(claims)
        self.done = []

    def claims(self):
        return self.of

    def sizes(self):
        return {}

    async def prepare(self, servers):
        self.done.append("prepare")

    async def round(self, servers, number):
        self.clock[0] += 60
        self.done.append(number)
        values = {"stock": next(self.ratios), "warm": 1.0}
        return [
            Sample(workload="w", point="p", system=system, round=number, values={"ttft_s": value})
            for system, value in values.items()
        ]

    async def finish(self, servers):
        self.done.append("finish")


@pytest.fixture
def clock(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(rounds.time, "monotonic", lambda: clock[0])
    return clock


async def measured(workload, limit_s=3600.0):
    """The verdict on its claim, and the samples."""
    samples, monitor = [], Monitor(1)
    await measure(workload, None, samples.append, limit_s, monitor)
    assert workload.done == ["prepare", *range(1, len(samples) // 2 + 1), "finish"]
    return evaluate(CLAIM, samples), samples


@pytest.mark.parametrize(("ratio", "outcome"), [(2.5, "holds"), (1.5, "does not hold")])
async def test_a_clear_claim_takes_the_least_number_of_rounds(clock, ratio, outcome):
    verdict, _ = await measured(Steps(clock, [ratio]))
    assert (verdict.outcome, verdict.n) == (outcome, LEAST_ROUNDS)


async def test_a_claim_near_its_bound_takes_more(clock):
    verdict, _ = await measured(Steps(clock, [1.9, 2.2, 2.2]))
    assert verdict.outcome == "holds"
    assert LEAST_ROUNDS < verdict.n < 60


async def test_at_its_time_limit_a_claim_is_undecided(clock):
    verdict, _ = await measured(Steps(clock, [1.9, 2.1]), limit_s=20 * 60)
    assert (verdict.outcome, verdict.n) == ("undecided", 20)
    assert clock[0] == 20 * 60


@pytest.mark.parametrize("limit_s", [0.0, 130.0])
async def test_one_or_two_rounds_give_no_verdict(clock, limit_s):
    verdict, samples = await measured(Steps(clock, [100.0]), limit_s)
    assert verdict.outcome == "undecided"
    assert 1 <= len(samples) // 2 <= 2


async def test_every_claim_must_be_decided(clock):
    other = Ratio("w", "p", "ttft_s", "stock", "warm", at_most=2.25)
    verdict, _ = await measured(Steps(clock, [2.2, 2.2, 2.3, 2.2, 2.2], (CLAIM, other)))
    assert verdict.n > LEAST_ROUNDS


async def test_a_claim_without_samples_is_not_waited_for(clock):
    verdict, _ = await measured(Steps(clock, [2.5], (CLAIM, Ratio("w", "q", "ttft_s", "stock", "warm", at_least=1))))
    assert verdict.n == LEAST_ROUNDS


async def test_a_line_tells_how_far_it_is(clock):
    monitor = Monitor(3)
    assert monitor.line() == "0 of 3 workloads"
    monitor.begin("w")
    assert monitor.line() == "0 of 3 workloads, w"
    await measure(Steps(clock, [1.9, 2.1]), None, lambda _: None, 120.0, monitor)
    assert monitor.line() == "0 of 3 workloads, w: round 2, 1 claims undecided, at most 0:00:00 left"
    monitor.end()
    assert monitor.line() == "1 of 3 workloads"
