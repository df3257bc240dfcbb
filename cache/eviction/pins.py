# SPDX-License-Identifier: Apache-2.0
"""Pinned entries, which are never evicted."""

from cache.errors import CapacityError
from cache.segments.index import ChunkKVCache


class Pins:
    """Counts pinned pages, at most ``limit`` of ``total``, so that others keep working."""

    def __init__(self, total: int, max_share: float) -> None:
        self.num_pages = 0
        self._total = total
        self._limit = int(total * max_share)

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
