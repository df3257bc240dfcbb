# SPDX-License-Identifier: Apache-2.0
"""Verdicts on claims."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from measuring.kit.statistics import Floats, interval, median, resampled
from measuring.speed.samples import Claim, Growth, Ratio, Sample, System, Value

CONFIDENCE: Final = 0.99
"""Confidence of each interval. It is looked at after each round, and each look may err: with 95 %,
one verdict in six would be wrong where the truth is at the bound."""
LEAST_ROUNDS: Final = 6
"""With fewer, a median's interval says little: it lies within the values seen."""

Outcome = Literal["holds", "does not hold", "undecided"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The claim's value, its confidence interval, and the number ``n`` of rounds.

    ``outcome`` tells whether the whole interval is within the claim's bounds, or outside them; ``None`` if it has none.
    """

    claim: Claim
    value: float
    low: float
    high: float
    n: int
    outcome: Outcome | None

    @property
    def holds(self) -> bool | None:
        """The outcome; ``None`` if there is none, or if it is undecided."""
        return {"holds": True, "does not hold": False}.get(self.outcome or "")

    @property
    def is_decided(self) -> bool:
        """Whether more rounds would change nothing."""
        return self.outcome != "undecided" and self.n >= LEAST_ROUNDS


def by_round(samples: Iterable[Sample], workload: str, point: str, system: System, value: Value) -> dict[int, float]:
    """The value in each round that has it."""
    return {
        sample.round: sample.values[value]
        for sample in samples
        if (sample.workload, sample.point, sample.system) == (workload, point, system) and value in sample.values
    }


def evaluate(claim: Claim, samples: Sequence[Sample]) -> Verdict | None:
    """The verdict on a claim; ``None`` if the samples lack what the claim is about."""
    estimate = _estimate(claim, samples)
    if estimate is None:
        return None
    value, statistics, n = estimate
    low, high = interval(statistics, CONFIDENCE)
    return Verdict(claim, value, low, high, n, _outcome(claim, low, high, n))


_Estimate = tuple[float, Floats, int]
"""The value, the value of each resample, and the number of rounds."""


def _estimate(claim: Claim, samples: Sequence[Sample]) -> _Estimate | None:
    match claim:
        case Ratio():
            return _median(_ratios(claim, samples))
        case Growth():
            first, last = (
                by_round(samples, claim.workload, point, claim.system, claim.value)
                for point in (claim.first, claim.last)
            )
            return _median([last[number] / first[number] for number in first if number in last])


def _ratios(ratio: Ratio, samples: Sequence[Sample]) -> list[float]:
    """Ratio in each round with both sides, which noise of the machine hits alike."""
    over, under = (
        by_round(samples, ratio.workload, ratio.point, system, ratio.value) for system in (ratio.over, ratio.under)
    )
    return [over[number] / under[number] for number in over if number in under]


def _median(values: Sequence[float]) -> _Estimate | None:
    return (median(values), resampled(values, np.median), len(values)) if values else None


def _outcome(claim: Claim, low: float, high: float, n: int) -> Outcome | None:
    at_least = -np.inf if claim.at_least is None else claim.at_least
    at_most = np.inf if claim.at_most is None else claim.at_most
    if claim.at_least is None and claim.at_most is None:
        return None
    if n >= LEAST_ROUNDS and at_least <= low and high <= at_most:
        return "holds"
    if n >= LEAST_ROUNDS and (high < at_least or at_most < low):
        return "does not hold"
    return "undecided"
