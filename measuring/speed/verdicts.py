# SPDX-License-Identifier: Apache-2.0
"""Verdicts on claims."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final, Literal

import numpy as np

from measuring.kit.statistics import interval
from measuring.speed.samples import Claim, Growth, Ratio, Sample, System

CONFIDENCE: Final = 0.99
"""Confidence of each interval. It is looked at after each round, and each look may err: with 95 %,
one verdict in six would be wrong where the truth is at the bound."""
LEAST_ROUNDS: Final = 6
"""With fewer, a median's interval says little: it lies within the values seen."""

Outcome = Literal["holds", "does not hold", "undecided"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """A claim's value, its confidence interval, and the number ``n`` of rounds.

    ``outcome`` tells whether the whole interval is within the claim's bounds, or outside them; ``None`` if it has none.
    """

    value: float
    low: float
    high: float
    n: int
    outcome: Outcome | None

    @property
    def is_decided(self) -> bool:
        """Whether more rounds would change nothing."""
        return self.outcome != "undecided" and self.n >= LEAST_ROUNDS


def evaluate(claim: Claim, samples: Sequence[Sample]) -> Verdict | None:
    """The verdict on a claim; ``None`` if the samples lack what the claim is about."""
    values = _values(claim, samples)
    if not values:
        return None
    low, high = interval(values, CONFIDENCE, np.median)
    return Verdict(median(values), low, high, len(values), _outcome(claim, low, high, len(values)))


def _values(claim: Claim, samples: Sequence[Sample]) -> list[float]:
    """The claim's ratio in each round that has both sides, which noise of the machine hits alike."""

    def by_round(point: str, system: System) -> dict[int, float]:
        return {
            sample.round: sample.values[claim.value]
            for sample in samples
            if (sample.workload, sample.point, sample.system) == (claim.workload, point, system)
            and claim.value in sample.values
        }

    match claim:
        case Ratio():
            over, under = by_round(claim.point, claim.over), by_round(claim.point, claim.under)
        case Growth():
            over, under = by_round(claim.last, claim.system), by_round(claim.first, claim.system)
    return [over[number] / under[number] for number in over if number in under]


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
