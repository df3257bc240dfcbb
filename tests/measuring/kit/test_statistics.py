# SPDX-License-Identifier: Apache-2.0
"""Bootstrap intervals."""

import numpy as np

from measuring.kit.statistics import interval


def test_intervals_have_the_mean_in_them_as_often_as_promised():
    values = [0.0] * 30 + [1.0] * 70
    low, high = interval(values, 0.95)
    assert 0.6 < low < 0.65  # 0.7 - 1.96 * sqrt(0.7 * 0.3 / 100) = 0.61
    assert 0.75 < high < 0.8
    wider = interval(values, 0.99)
    assert wider[0] < low < high < wider[1]
    assert interval(values, 0.95) == (low, high)  # the same each time
    random = np.random.default_rng(0)
    intervals = [interval(random.binomial(1, 0.6, 60), 0.8) for _ in range(150)]
    covered = np.mean([low <= 0.6 <= high for low, high in intervals])
    assert 0.7 < covered < 0.9
