# SPDX-License-Identifier: Apache-2.0
"""Medians of ratios within rounds, their intervals, and what these say of a claim."""

import pytest

from measuring.speed.samples import Growth, Ratio, Sample
from measuring.speed.verdicts import LEAST_ROUNDS, evaluate

RATIO = Ratio("w", "p", "ttft_s", "stock", "warm")


def samples(system, values, point="p", first_round=1, workload="w", value="ttft_s"):
    return [
        Sample(workload=workload, point=point, system=system, round=number, values={value: each})
        for number, each in enumerate(values, first_round)
    ]


def test_ratios_and_growth_are_taken_within_each_round():
    """The machine is ten times slower in the last round; both sides met that."""
    verdict = evaluate(RATIO, [*samples("stock", [2.0, 4.0, 60.0]), *samples("warm", [1.0, 1.0, 10.0])])
    assert (verdict.value, verdict.n, verdict.outcome) == (4.0, 3, None)
    assert 2.0 <= verdict.low <= verdict.value <= verdict.high <= 6.0
    taken = [*samples("warm", [1.0, 2.0, 3.0], point="a"), *samples("warm", [4.0, 8.0, 9.0, 8.0], point="b")]
    verdict = evaluate(Growth("w", "a", "b", "ttft_s", "warm", at_most=4.0), taken)
    assert (verdict.value, verdict.n, verdict.high) == (4.0, 3, 4.0)


def test_nothing_but_rounds_with_both_sides_of_the_claim_counts():
    taken = [*samples("stock", [2.0, 8.0, 9.0]), *samples("warm", [2.0], first_round=2)]
    others = [
        *samples("stock", [1.0, 1.0], point="q"),
        *samples("stock", [1.0, 1.0], workload="v"),
        *samples("empty", [1.0, 1.0]),
        *samples("stock", [1.0, 1.0], value="tpot_s"),
    ]
    verdict = evaluate(RATIO, [*others, *taken, *others])
    assert (verdict.value, verdict.n, verdict.low, verdict.high) == (4.0, 1, 4.0, 4.0)


@pytest.mark.parametrize("claim", [RATIO, Growth("w", "p", "q", "ttft_s", "stock")], ids=lambda claim: type(claim))
def test_without_its_samples_nothing_is_said_of_a_claim(claim):
    assert evaluate(claim, []) is evaluate(claim, samples("stock", [1.0])) is None


@pytest.mark.parametrize(
    ("bounds", "outcome"),
    [
        ({}, None),
        ({"at_least": 2.0}, "holds"),
        ({"at_least": 2.1}, "does not hold"),
        ({"at_most": 2.0}, "holds"),
        ({"at_most": 1.9}, "does not hold"),
        ({"at_least": 1.0, "at_most": 3.0}, "holds"),
        ({"at_least": 0.0, "at_most": 0.0}, "does not hold"),
    ],
)
def test_bounds_include_their_ends(bounds, outcome):
    claim = Ratio("w", "p", "ttft_s", "stock", "warm", **bounds)
    for rounds in (1, LEAST_ROUNDS - 1, LEAST_ROUNDS):
        verdict = evaluate(claim, [*samples("stock", [2.0] * rounds), *samples("warm", [1.0] * rounds)])
        is_enough = rounds == LEAST_ROUNDS  # few decide nothing, however clear they look
        assert verdict.outcome == (outcome if is_enough or not bounds else "undecided")
        assert verdict.is_decided == is_enough


def test_an_interval_with_the_bound_inside_decides_nothing():
    taken = [*samples("stock", [1.0, 3.0] * LEAST_ROUNDS), *samples("warm", [1.0] * 2 * LEAST_ROUNDS)]
    verdict = evaluate(Ratio("w", "p", "ttft_s", "stock", "warm", at_least=2.0), taken)
    assert (verdict.outcome, verdict.is_decided) == ("undecided", False)
    assert evaluate(RATIO, taken).is_decided  # without bounds it needs its rounds only
