# SPDX-License-Identifier: Apache-2.0
"""Medians, ratios within rounds, and their intervals."""

import numpy as np
import pytest

from measuring.speed.samples import Growth, Ratio, Sample
from measuring.speed.verdicts import CONFIDENCE, LEAST_ROUNDS, by_round, evaluate

RATIO = Ratio("w", "p", "ttft_s", "stock", "warm")


def samples(system, values, point="p", first_round=1, workload="w", value="ttft_s"):
    return [
        Sample(workload=workload, point=point, system=system, round=number, values={value: each})
        for number, each in enumerate(values, first_round)
    ]


def test_a_ratio_is_taken_within_each_round():
    """The machine is ten times slower in the last round; both sides met that."""
    verdict = evaluate(RATIO, [*samples("stock", [2.0, 4.0, 60.0]), *samples("warm", [1.0, 1.0, 10.0])])
    assert (verdict.value, verdict.n, verdict.outcome) == (4.0, 3, None)
    assert 2.0 <= verdict.low <= verdict.value <= verdict.high <= 6.0


def test_rounds_that_only_one_side_has_dont_count():
    verdict = evaluate(RATIO, [*samples("stock", [2.0, 4.0, 9.0]), *samples("warm", [1.0], first_round=2)])
    assert (verdict.value, verdict.n, verdict.low, verdict.high) == (4.0, 1, 4.0, 4.0)


def test_other_points_workloads_systems_and_values_dont_count():
    taken = [*samples("stock", [8.0]), *samples("warm", [2.0])]
    others = [
        *samples("stock", [1.0], point="q"),
        *samples("stock", [1.0], workload="v"),
        *samples("empty", [1.0]),
        *samples("stock", [1.0], value="tpot_s", first_round=2),
    ]
    assert evaluate(RATIO, [*others, *taken, *others]).value == 4.0
    assert by_round([*others, *taken], "w", "p", "stock", "ttft_s") == {1: 8.0}


def test_growth_is_taken_within_each_round():
    taken = [*samples("warm", [1.0, 2.0, 3.0], point="a"), *samples("warm", [4.0, 8.0, 9.0, 8.0], point="b")]
    verdict = evaluate(Growth("w", "a", "b", "ttft_s", "warm", at_most=4.0), taken)
    assert (verdict.value, verdict.n, verdict.high) == (4.0, 3, 4.0)


@pytest.mark.parametrize("claim", [RATIO, Growth("w", "p", "q", "ttft_s", "stock")], ids=lambda claim: type(claim))
def test_without_its_samples_nothing_is_said_of_a_claim(claim):
    assert evaluate(claim, []) is None
    assert evaluate(claim, samples("stock", [1.0])) is None


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
    taken = [*samples("stock", [2.0] * LEAST_ROUNDS), *samples("warm", [1.0] * LEAST_ROUNDS)]
    assert evaluate(claim, taken).outcome == outcome


@pytest.mark.parametrize("rounds", range(1, LEAST_ROUNDS))
@pytest.mark.parametrize("ratio", [1.0, 100.0])
def test_few_samples_decide_nothing_however_clear_they_look(rounds, ratio):
    claim = Ratio("w", "p", "ttft_s", "stock", "warm", at_least=40)
    verdict = evaluate(claim, [*samples("stock", [ratio] * rounds), *samples("warm", [1.0] * rounds)])
    assert (verdict.outcome, verdict.is_decided) == ("undecided", False)


def test_an_interval_with_the_bound_inside_decides_nothing():
    claim = Ratio("w", "p", "ttft_s", "stock", "warm", at_least=2.0)
    taken = [*samples("stock", [1.0, 3.0] * LEAST_ROUNDS), *samples("warm", [1.0] * 2 * LEAST_ROUNDS)]
    assert evaluate(claim, taken).outcome == "undecided"


def test_a_claim_without_bounds_needs_its_rounds_only():
    taken = [*samples("stock", [1.0, 3.0] * LEAST_ROUNDS), *samples("warm", [1.0] * 2 * LEAST_ROUNDS)]
    assert evaluate(RATIO, taken).is_decided
    assert not evaluate(RATIO, taken[:1] + samples("warm", [1.0])).is_decided


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    rng = np.random.default_rng(1)
    covered = 0
    for _ in range(60):
        taken = [*samples("stock", rng.normal(3.0, 0.3, 25).tolist()), *samples("warm", [1.0] * 25)]
        verdict = evaluate(RATIO, taken)
        covered += verdict.low <= 3.0 <= verdict.high
    assert 55 <= covered <= 60
    assert CONFIDENCE == 0.99


def test_the_same_samples_give_the_same_interval():
    taken = [*samples("stock", [2.0, 3.0, 5.0, 7.0]), *samples("warm", [1.0, 1.0, 2.0, 2.0])]
    assert evaluate(RATIO, taken) == evaluate(RATIO, taken)
