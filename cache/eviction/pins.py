# SPDX-License-Identifier: Apache-2.0
"""Pinned entries, which are never evicted."""

from typing import Final

from cache.errors import CapacityError
from cache.segments.index import ChunkKVCache

MAX_PINNED_SHARE: Final = 0.9
"""Share of the pool that can be pinned, so that others keep working."""


class Pins:
    """Counts pinned pages of ``total``."""

    def __init__(self, total: int) -> None:
        self.num_pages = 0
        self._total = total
        self._limit = int(total * MAX_PINNED_SHARE)

    def pin(self, entry: ChunkKVCache) -> None:
        """Pins an entry; raises :class:`CapacityError` if too little would be left."""
        if self.num_pages + entry.num_pages > self._limit:
            raise CapacityError(
                f"pinning {entry.num_pages} more pages would exceed {self._limit} of {self._total} pages; "
                f"{self.num_pages} are pinned"
            )
        entry.pinned = True
        self.num_pages += entry.num_pages

    def unpin(self, entry: ChunkKVCache) -> None:
        """Unpins a pinned entry."""
        entry.pinned = False
        self.num_pages -= entry.num_pages
