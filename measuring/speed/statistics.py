# SPDX-License-Identifier: Apache-2.0
"""Medians, and how far the claims made of them can be trusted.

Intervals are percentile bootstraps: the same statistic of as many rounds, drawn with replacement, many times over.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from measuring.speed.samples import Claim, Growth, Ratio, Sample, System, Value

CONFIDENCE = 0.95
_RESAMPLES = 10_000
_SEED = 0

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The claim's value, its 95 % confidence interval, and the rounds it rests on, ``n``.

    ``holds`` tells whether ``value`` is within the claim's bounds; ``None`` if it has none.
    """

    claim: Claim
    value: float
    low: float
    high: float
    n: int
    holds: bool | None


def median(values: Sequence[float]) -> float:
    """Of at least one value."""
    return float(np.median(values))


def p95(values: Sequence[float]) -> float:
    """The 95th percentile, interpolated, of at least one value."""
    return float(np.percentile(values, 95))


def by_round(samples: Iterable[Sample], workload: str, point: str, system: System, value: Value) -> dict[int, float]:
    """The value in each round that has it."""
    return {
        sample.round: sample.values[value]
        for sample in samples
        if (sample.workload, sample.point, sample.system) == (workload, point, system) and value in sample.values
    }


def evaluate(claim: Claim, samples: Sequence[Sample]) -> Verdict | None:
    """What the samples say of the claim; ``None`` if they don't have what it is about."""
    estimate = _estimate(claim, samples, np.random.default_rng(_SEED))
    if estimate is None:
        return None
    value, resampled, n = estimate
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(resampled, [tail, 1 - tail])
    return Verdict(claim, value, float(low), float(high), n, _holds(claim, value))


_Estimate = tuple[float, Floats, int]
"""The value, the value of each resample, and the number of rounds."""


def _estimate(claim: Claim, samples: Sequence[Sample], rng: np.random.Generator) -> _Estimate | None:
    match claim:
        case Ratio():
            return _median(_ratios(claim, samples), rng)
        case Growth():
            first, last = (
                _median(list(by_round(samples, claim.workload, point, claim.system, claim.value).values()), rng)
                for point in (claim.first, claim.last)
            )
    if first is None or last is None:
        return None
    return last[0] / first[0], last[1] / first[1], min(first[2], last[2])


def _ratios(ratio: Ratio, samples: Sequence[Sample]) -> list[float]:
    """Of each round that has both: what disturbs a round disturbs both sides."""
    over, under = (
        by_round(samples, ratio.workload, ratio.point, system, ratio.value) for system in (ratio.over, ratio.under)
    )
    return [over[number] / under[number] for number in over if number in under]


def _median(values: Sequence[float], rng: np.random.Generator) -> _Estimate | None:
    if not values:
        return None
    drawn = np.asarray(values)[rng.integers(0, len(values), (_RESAMPLES, len(values)))]
    return median(values), np.median(drawn, axis=1), len(values)


def _holds(claim: Claim, value: float) -> bool | None:
    if claim.at_least is None and claim.at_most is None:
        return None
    return (claim.at_least is None or value >= claim.at_least) and (claim.at_most is None or value <= claim.at_most)
