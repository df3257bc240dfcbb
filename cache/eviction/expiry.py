# SPDX-License-Identifier: Apache-2.0
"""Entries by the time at which they expire, and the clock for it."""

import heapq
import itertools
import time
from collections.abc import Iterator
from typing import Final

from cache.segments.index import ChunkKVCache

_OFFSET: Final = time.time() - time.monotonic()


def now() -> float:
    """Seconds since the epoch: the system's clock when the process started, plus the time since.

    Setting the system's clock does not change it: durations stay right, dates as wrong as at the start.
    """
    return _OFFSET + time.monotonic()


class ExpiryQueue:
    """Finds expired entries without looking at the others."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, ChunkKVCache]] = []
        self._puts = itertools.count()

    def put(self, entry: ChunkKVCache, expires_at: float | None) -> None:
        """Lets ``entry`` expire at this time, or never, instead of at an earlier one."""
        entry.expires_at = expires_at
        if expires_at is not None:
            heapq.heappush(self._heap, (expires_at, next(self._puts), entry))

    def due(self, now: float) -> Iterator[ChunkKVCache]:
        """Removes and yields the entries that have expired at ``now``."""
        while self._heap and self._heap[0][0] <= now:
            expires_at, _, entry = heapq.heappop(self._heap)
            if entry.expires_at == expires_at:  # else it was changed later, and put again
                yield entry
