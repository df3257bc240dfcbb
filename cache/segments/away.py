# SPDX-License-Identifier: Apache-2.0
"""Segments that have left the pool, and are in tiers only."""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from cache.eviction.removal import FOR_GOOD, Removal
from cache.segments.chunk_ids import ChunkIds
from cache.segments.hashing import ChunkHash
from cache.segments.holdings import Holdings
from cache.segments.index import ChunkKVCache, EntryState, ExpiryQueue, SegmentIdentity

MOST_AWAY: Final = 20_000
"""Segments remembered. Requests find forgotten ones in the tiers as well; lists don't."""
_STORED_STILL: Final = (Removal.EVICTED, Removal.ASLEEP, Removal.REFUSED)


class Away:
    """Segments that are in tiers only, as far as is known; their ids and documents stay.

    A tier may evict a file without a word: then the segment is computed, when a request needs it. The oldest segments
    are forgotten beyond :data:`MOST_AWAY`.
    """

    def __init__(self, ids: ChunkIds, holdings: Holdings, expiry: ExpiryQueue, tags: Iterator[int]) -> None:
        """``tags`` number the entries of the cache."""
        self._ids = ids
        self._holdings = holdings
        self._expiry = expiry
        self._tags = tags
        self._entries: OrderedDict[ChunkHash, ChunkKVCache] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[ChunkKVCache]:
        return iter(self._entries.values())

    def get(self, key: ChunkHash) -> ChunkKVCache | None:
        """The segment's entry, whose state is ``STORED``."""
        return self._entries.get(key)

    def left(self, entry: ChunkKVCache, why: Removal) -> None:
        """Records that an entry has left the pool."""
        if entry.tiers and why in _STORED_STILL:
            self._add(replace(entry, pages=[], leases=0, pinned=False, state=EntryState.STORED))
        elif entry.key not in self._entries or why is not Removal.FILL_FAILED:
            self.forget(entry.key, why)

    def restore(
        self,
        key: ChunkHash,
        identity: SegmentIdentity,
        tiers: tuple[str, ...],
        created_at: float,
        expires_at: float | None,
    ) -> ChunkKVCache:
        """Adds a segment that another process has stored; returns its entry."""
        entry = ChunkKVCache(key, identity, [], next(self._tags), created_at, created_at, is_system=False)
        entry.state, entry.detached, entry.tiers, entry.expires_at = EntryState.STORED, True, tiers, expires_at
        self._add(entry)
        return entry

    def _add(self, entry: ChunkKVCache) -> None:
        self._entries[entry.key] = entry
        self._expiry.put(entry, entry.expires_at)
        self._holdings.moved(entry)
        if len(self._entries) > MOST_AWAY:
            self.forget(next(iter(self._entries)), Removal.EVICTED)

    def came_back(self, entry: ChunkKVCache) -> None:
        """Records that an entry can be loaded from the pool."""
        if self._entries.pop(entry.key, None) is not None:
            self._holdings.moved(entry)

    def forget(self, key: ChunkHash, why: Removal) -> None:
        """Ends a segment's ids and documents."""
        self._entries.pop(key, None)
        self._ids.removed(key, why)
        self._holdings.removed(key, for_good=why in FOR_GOOD)
