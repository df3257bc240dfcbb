# SPDX-License-Identifier: Apache-2.0
"""Medians, ratios within rounds, and their intervals."""

import statistics

import numpy as np
import pytest

from measuring.speed.samples import Growth, Ratio, Sample
from measuring.speed.statistics import by_round, evaluate, median, p95

RATIO = Ratio("w", "p", "ttft_s", "stock", "warm")


def samples(system, values, point="p", first_round=1, workload="w", value="ttft_s"):
    return [
        Sample(workload=workload, point=point, system=system, round=number, values={value: each})
        for number, each in enumerate(values, first_round)
    ]


def test_median_and_p95_are_those_of_the_standard_library():
    values = [float(number**2) for number in range(41)]
    assert median(values) == statistics.median(values)
    assert p95(values) == pytest.approx(statistics.quantiles(values, n=20, method="inclusive")[-1])
    assert median([3.0]) == p95([3.0]) == 3.0


def test_a_ratio_is_taken_within_each_round():
    """The machine is ten times slower in the last round; both sides met that."""
    verdict = evaluate(RATIO, [*samples("stock", [2.0, 4.0, 60.0]), *samples("warm", [1.0, 1.0, 10.0])])
    assert (verdict.value, verdict.n, verdict.holds) == (4.0, 3, None)
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


def test_growth_compares_medians_of_two_points():
    taken = [*samples("warm", [1.0, 2.0, 3.0], point="a"), *samples("warm", [9.0, 8.0, 7.0, 8.0], point="b")]
    verdict = evaluate(Growth("w", "a", "b", "ttft_s", "warm", at_most=4.0), taken)
    assert (verdict.value, verdict.n, verdict.holds) == (4.0, 3, True)
    assert verdict.low < 4.0 < verdict.high


@pytest.mark.parametrize("claim", [RATIO, Growth("w", "p", "q", "ttft_s", "stock")], ids=lambda claim: type(claim))
def test_without_its_samples_nothing_is_said_of_a_claim(claim):
    assert evaluate(claim, []) is None
    assert evaluate(claim, samples("stock", [1.0])) is None


@pytest.mark.parametrize(
    ("bounds", "holds"),
    [
        ({}, None),
        ({"at_least": 2.0}, True),
        ({"at_least": 2.1}, False),
        ({"at_most": 2.0}, True),
        ({"at_most": 1.9}, False),
        ({"at_least": 1.0, "at_most": 3.0}, True),
        ({"at_least": 0.0, "at_most": 0.0}, False),
    ],
)
def test_bounds_include_their_ends(bounds, holds):
    claim = Ratio("w", "p", "ttft_s", "stock", "warm", **bounds)
    assert evaluate(claim, [*samples("stock", [2.0]), *samples("warm", [1.0])]).holds is holds


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    rng = np.random.default_rng(1)
    covered = 0
    for _ in range(60):
        taken = [*samples("stock", rng.normal(3.0, 0.3, 25).tolist()), *samples("warm", [1.0] * 25)]
        verdict = evaluate(RATIO, taken)
        covered += verdict.low <= 3.0 <= verdict.high
    assert 50 <= covered <= 60


def test_the_same_samples_give_the_same_interval():
    taken = [*samples("stock", [2.0, 3.0, 5.0, 7.0]), *samples("warm", [1.0, 1.0, 2.0, 2.0])]
    assert evaluate(RATIO, taken) == evaluate(RATIO, taken)
