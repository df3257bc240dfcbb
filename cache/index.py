# SPDX-License-Identifier: Apache-2.0
"""The index from chunk keys to cached KV."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from cache.hashing import CacheScope, ChunkHash
from cache.layout import PackedTokens, TokenIds, packed_length, unpack


class EntryState(Enum):
    """Life of a cached segment's KV: it is being computed, can be loaded, or was never saved."""

    FILLING = auto()
    READY = auto()
    FAILED = auto()


class SegmentIdentity(NamedTuple):
    """What a key stands for, kept so that a hash collision is a miss: the tokens, those before them, the scope.

    Packed (:func:`cache.layout.pack`), so that comparing is comparing memory.
    """

    scope: CacheScope
    prefix: PackedTokens
    tokens: PackedTokens

    @property
    def prefix_ids(self) -> TokenIds:
        """The tokens that the segment was computed behind."""
        return unpack(self.prefix)

    @property
    def token_ids(self) -> TokenIds:
        """The segment's own tokens."""
        return unpack(self.tokens)

    @property
    def num_prefix_tokens(self) -> int:
        """Length of what the segment was computed behind."""
        return packed_length(self.prefix)

    @property
    def num_tokens(self) -> int:
        """Length of the segment."""
        return packed_length(self.tokens)


@dataclass(slots=True, eq=False)
class ChunkKVCache:
    """One segment's KV in the pool.

    ``tag`` is unique to this fill: workers write it on each page that they save, and refuse to load a page that
    carries another; tags grow, so they also tell which entry is older. Pages are not reused while the state is
    FILLING or while ``leases``, the number of requests that may still load the segment, is not 0.
    """

    key: ChunkHash
    identity: SegmentIdentity
    pages: list[int]
    tag: int
    recompute_cost: float
    """Of computing the segment again, as eviction weighs it (:func:`cache.eviction.prefill_cost`)."""
    created_at: float
    """Seconds since the epoch; likewise ``last_used_at`` and ``expires_at``."""
    last_used_at: float
    is_system: bool
    state: EntryState = EntryState.FILLING
    detached: bool = False
    """No request finds it any more; those that hold a lease may still load it."""
    leases: int = 0
    hits: int = 0
    pinned: bool = False
    """Eviction passes it over."""
    expires_at: float | None = None
    stored: bool = False
    """A tier has been given it."""

    @property
    def num_pages(self) -> int:
        """Pages of the pool that it takes."""
        return len(self.pages)


class ChunkHashIndex:
    """Maps keys to entries; oldest first."""

    def __init__(self) -> None:
        self._entries: dict[ChunkHash, ChunkKVCache] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[ChunkKVCache]:
        return iter(self._entries.values())

    def get(self, key: ChunkHash, identity: SegmentIdentity) -> ChunkKVCache | None:
        """The entry of ``key``. ``None`` if absent, or if the key collides with another's."""
        entry = self._entries.get(key)
        return entry if entry is not None and entry.identity == identity else None

    def by_key(self, key: ChunkHash) -> ChunkKVCache | None:
        """The entry of ``key``, whatever it stands for."""
        return self._entries.get(key)

    def put(self, entry: ChunkKVCache) -> ChunkKVCache | None:
        """Adds ``entry``; returns the entry that it displaced (a hash collision)."""
        displaced = self._entries.pop(entry.key, None)
        self._entries[entry.key] = entry
        return displaced

    def remove(self, entry: ChunkKVCache) -> None:
        """Removes ``entry`` if the index still holds it (and not another entry of the same key)."""
        if self._entries.get(entry.key) is entry:
            del self._entries[entry.key]
