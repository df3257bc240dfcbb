# SPDX-License-Identifier: Apache-2.0
"""Medians, percentiles and bootstrap intervals."""

import statistics

import numpy as np
import pytest

from measuring.kit.statistics import mean_interval, median, p95


def test_median_and_p95_are_those_of_the_standard_library():
    values = [float(number**2) for number in range(41)]
    assert median(values) == statistics.median(values)
    assert p95(values) == pytest.approx(statistics.quantiles(values, n=20, method="inclusive")[-1])
    assert median([3.0]) == p95([3.0]) == 3.0


def test_the_interval_has_the_mean_in_it_and_grows_with_confidence():
    values = [0.0] * 30 + [1.0] * 70
    low, high = mean_interval(values, 0.95)
    assert 0.6 < low < 0.65  # 0.7 - 1.96 * sqrt(0.7 * 0.3 / 100) = 0.61
    assert 0.75 < high < 0.8
    wider = mean_interval(values, 0.99)
    assert wider[0] < low < high < wider[1]
    assert mean_interval(values, 0.95) == (low, high)


def test_equal_values_have_an_interval_without_width():
    assert mean_interval([1.0] * 5, 0.95) == (1.0, 1.0)


def test_about_as_many_intervals_have_the_true_mean_as_promised():
    random = np.random.default_rng(0)
    intervals = [mean_interval(random.binomial(1, 0.6, 60), 0.8) for _ in range(150)]
    covered = np.mean([low <= 0.6 <= high for low, high in intervals])
    assert 0.7 < covered < 0.9
