# SPDX-License-Identifier: Apache-2.0
"""Medians, percentiles and bootstrap intervals."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_RESAMPLES = 2000
_SEED = 0


def median(values: Sequence[float]) -> float:
    """Median of at least one value."""
    return float(np.median(values))


def p95(values: Sequence[float]) -> float:
    """95th percentile, interpolated, of at least one value."""
    return float(np.percentile(values, 95))


def resampled(values: Sequence[float], statistic: Callable[[Floats], Any], seed: int = _SEED) -> Floats:
    """The statistic of many bootstrap resamples, drawn with replacement, of at least one value."""
    sample, random = np.asarray(values, dtype=np.float64), np.random.default_rng(seed)
    draws = (sample[random.integers(sample.size, size=sample.size)] for _ in range(_RESAMPLES))
    return np.array([statistic(drawn) for drawn in draws])


def interval(statistics: Floats, confidence: float) -> tuple[float, float]:
    """Percentile bootstrap interval (Efron 1979, Annals of Statistics 7(1)) from :func:`resampled` statistics.

    Values that are all equal give an interval without width, however few they are.
    """
    low, high = np.quantile(statistics, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def mean_interval(values: Sequence[float], confidence: float) -> tuple[float, float]:
    """Interval for the mean of at least one value."""
    return interval(resampled(values, np.mean), confidence)
