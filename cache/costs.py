# SPDX-License-Identifier: Apache-2.0
"""Moving averages of prefill, fetch and load cost."""

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Final

from cache.segments.holdings import Tier

RELEVANT_S: Final = 60.0
"""Age at which a measurement is forgotten, so that a way that was too slow is tried again."""
_WEIGHT: Final = 0.2


class Pace:
    """Seconds per unit, as an exponentially weighted mean."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seconds_per_unit = 0.0
        self._seen_at = -RELEVANT_S

    def observe(self, amount: float, seconds: float) -> None:
        """Records that ``amount`` units took ``seconds``."""
        now, pace = self._clock(), seconds / amount
        is_known = now - self._seen_at < RELEVANT_S
        self._seconds_per_unit += (_WEIGHT if is_known else 1) * (pace - self._seconds_per_unit)
        self._seen_at = now

    def given_up(self, amount: float, seconds: float) -> None:
        """Records that ``amount`` units would have taken more than ``seconds``; twice that is assumed at once."""
        self._seconds_per_unit = max(self._seconds_per_unit, 2 * seconds / amount)
        self._seen_at = self._clock()

    def seconds(self, amount: float) -> float | None:
        """Expected time of ``amount`` units; ``None`` if unknown."""
        return amount * self._seconds_per_unit if self._clock() - self._seen_at < RELEVANT_S else None


class Costs:
    """Paces of computing (tokens), and of fetching by replicas' tier and loading by own tier (bytes)."""

    def __init__(self) -> None:
        self.computing = Pace()
        self.fetching: defaultdict[Tier, Pace] = defaultdict(Pace)
        self.loading: defaultdict[str, Pace] = defaultdict(Pace)

    def is_worth_fetching(self, tier: Tier, num_tokens: int, num_bytes: int) -> bool:
        """Whether fetching what a replica has in ``tier`` is quicker than computing; True if either is unknown."""
        return self._is_quicker(self.fetching[tier].seconds(num_bytes), num_tokens)

    def is_worth_loading(self, tier: str, num_tokens: int, num_bytes: int) -> bool:
        """Whether loading from ``tier`` is quicker than computing; True if either is unknown."""
        return self._is_quicker(self.loading[tier].seconds(num_bytes), num_tokens)

    def _is_quicker(self, moving: float | None, num_tokens: int) -> bool:
        computing = self.computing.seconds(num_tokens)
        return computing is None or moving is None or moving < computing
