# SPDX-License-Identifier: Apache-2.0
"""How many rounds a workload gets."""

import itertools
from dataclasses import replace

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
        self.clock, self.ratios, self.of = clock, itertools.cycle(ratios), claims
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
        return [
            Sample(workload="w", point="p", system=system, round=number, values={"ttft_s": value})
            for system, value in (("stock", next(self.ratios)), ("warm", 1.0))
        ]

    async def finish(self, servers):
        self.done.append("finish")


@pytest.fixture
def clock(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(rounds.time, "monotonic", lambda: clock[0])
    return clock


async def measured(workload, limit_s=3600.0):
    """The verdict on its claim."""
    samples, monitor = [], Monitor(1)
    await measure(workload, None, samples.append, limit_s, monitor)
    assert workload.done == ["prepare", *range(1, len(samples) // 2 + 1), "finish"]
    return evaluate(CLAIM, samples)


@pytest.mark.parametrize(("ratio", "outcome"), [(2.5, "holds"), (1.5, "does not hold")])
async def test_a_clear_claim_takes_the_least_number_of_rounds(clock, ratio, outcome):
    verdict = await measured(Steps(clock, [ratio]))
    assert (verdict.outcome, verdict.n) == (outcome, LEAST_ROUNDS)


async def test_a_claim_near_its_bound_takes_more(clock):
    verdict = await measured(Steps(clock, [1.9, 2.2, 2.2]))
    assert verdict.outcome == "holds"
    assert LEAST_ROUNDS < verdict.n < 60


@pytest.mark.parametrize(("limit_s", "ratios", "rounds"), [(0, [9], 1), (130, [9], 2), (1200, [1.9, 2.1], 20)])
async def test_at_its_time_limit_a_claim_is_undecided(clock, limit_s, ratios, rounds):
    verdict = await measured(Steps(clock, ratios), limit_s)
    assert (verdict.outcome, verdict.n) == ("undecided", rounds)


async def test_every_claim_with_samples_must_be_decided(clock):
    other = Ratio("w", "p", "ttft_s", "stock", "warm", at_most=2.25)
    ratios = [2.2, 2.2, 2.3, 2.2, 2.2]
    assert (await measured(Steps(clock, ratios, [CLAIM, other]))).n > LEAST_ROUNDS
    assert (await measured(Steps(clock, ratios, [CLAIM, replace(other, point="q")]))).n == LEAST_ROUNDS


async def test_a_line_tells_how_far_it_is(clock):
    monitor = Monitor(3)
    assert monitor.line() == "0 of 3 workloads"
    monitor.begin("w")
    assert monitor.line() == "0 of 3 workloads, w"
    await measure(Steps(clock, [1.9, 2.1]), None, lambda _: None, 120.0, monitor)
    assert monitor.line() == "0 of 3 workloads, w: round 2, 1 claims undecided, at most 0:00:00 left"
    monitor.end()
    assert monitor.line() == "1 of 3 workloads"
