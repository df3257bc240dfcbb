# SPDX-License-Identifier: Apache-2.0
"""Loads of the replicas, as a router estimates them."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_PEAK_S = 1.5
"""Half the time that peaks are remembered: heartbeats come, and are read, once a second."""


class InFlight:
    """This router's unfinished requests by replica, and their recent peaks."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._now: Counter[str] = Counter()
        self._peaks: list[Counter[str]] = [Counter(), Counter()]
        self._rotate_at = clock()

    def __getitem__(self, replica: str) -> int:
        return self._now[replica]

    def add(self, replica: str, change: int) -> None:
        """Adds ``change`` unfinished requests."""
        self._now[replica] += change
        self._rotate()
        self._peaks[0][replica] = max(self._peaks[0][replica], self._now[replica])

    @contextmanager
    def one(self, replica: str) -> Iterator[None]:
        """Counts a request as unfinished within the context."""
        self.add(replica, 1)
        try:
            yield
        finally:
            self.add(replica, -1)

    def load(self, replica: str, heartbeat: int) -> int:
        """A replica's load: its last ``heartbeat`` without our requests counted in it, plus ours now."""
        self._rotate()
        peak = max(self._now[replica], *(peaks[replica] for peaks in self._peaks))
        return max(0, heartbeat - peak) + self._now[replica]

    def _rotate(self) -> None:
        if (now := self._clock()) >= self._rotate_at:
            self._peaks = [Counter(self._now), self._peaks[0]]
            self._rotate_at = now + _PEAK_S
