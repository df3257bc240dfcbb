# SPDX-License-Identifier: Apache-2.0
"""Entries that expire, by when."""

import heapq
from collections.abc import Iterator

from cache.index import ChunkKVCache


class ExpiryQueue:
    """Finds what has expired without looking at what has not."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, ChunkKVCache]] = []

    def put(self, entry: ChunkKVCache) -> None:
        """Adds ``entry``, whose ``expires_at`` is set; to be called again whenever that changes."""
        assert entry.expires_at is not None
        heapq.heappush(self._heap, (entry.expires_at, entry.tag, entry))

    def due(self, now: float) -> Iterator[ChunkKVCache]:
        """Takes out the entries that have expired at ``now``."""
        while self._heap and self._heap[0][0] <= now:
            expires_at, _, entry = heapq.heappop(self._heap)
            if entry.expires_at == expires_at:  # else it was changed later, and put anew
                yield entry
