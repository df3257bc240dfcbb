# SPDX-License-Identifier: Apache-2.0
"""What it takes to get KV, as seen on this machine of late: by computing it, and by fetching it."""

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Final

RELEVANT_S: Final = 60.0
"""After so long without a measurement nothing is known: what was too slow is tried again."""
_WEIGHT: Final = 0.2


class Pace:
    """Seconds for an amount of something, an exponentially weighted mean of what was seen."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seconds_per_unit = 0.0
        self._seen_at = -RELEVANT_S

    def observe(self, amount: float, seconds: float) -> None:
        """Something of the size ``amount`` took ``seconds``."""
        now, pace = self._clock(), seconds / amount
        is_known = now - self._seen_at < RELEVANT_S
        self._seconds_per_unit += (_WEIGHT if is_known else 1) * (pace - self._seconds_per_unit)
        self._seen_at = now

    def seconds(self, amount: float) -> float | None:
        """How long ``amount`` will take; ``None`` if nothing is known."""
        return amount * self._seconds_per_unit if self._clock() - self._seen_at < RELEVANT_S else None


class Costs:
    """``computing`` is by tokens; ``fetching`` from other replicas and ``loading``, by tier, are by bytes."""

    def __init__(self) -> None:
        self.computing = Pace()
        self.fetching = Pace()
        self.loading: defaultdict[str, Pace] = defaultdict(Pace)

    def is_worth_fetching(self, num_tokens: int, num_bytes: int) -> bool:
        """Whether to fetch is quicker than to compute; also if one of them is yet to be seen."""
        return self._is_quicker(self.fetching.seconds(num_bytes), num_tokens)

    def is_worth_loading(self, tier: str, num_tokens: int, num_bytes: int) -> bool:
        """The same of loading from a tier."""
        return self._is_quicker(self.loading[tier].seconds(num_bytes), num_tokens)

    def _is_quicker(self, moving: float | None, num_tokens: int) -> bool:
        computing = self.computing.seconds(num_tokens)
        return computing is None or moving is None or moving < computing
