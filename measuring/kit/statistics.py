# SPDX-License-Identifier: Apache-2.0
"""Bootstrap intervals."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

_RESAMPLES = 2000
_SEED = 0


def interval(
    values: Sequence[float], confidence: float, statistic: Callable[..., Any] = np.mean
) -> tuple[float, float]:
    """Percentile bootstrap interval (Efron 1979, Annals of Statistics 7(1)) of a numpy statistic of at least one value.

    Values that are all equal give an interval without width, however few they are.
    """
    sample, random = np.asarray(values, dtype=np.float64), np.random.default_rng(_SEED)
    resamples = sample[random.integers(sample.size, size=(_RESAMPLES, sample.size))]
    low, high = np.quantile(statistic(resamples, axis=1), [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)
