# SPDX-License-Identifier: Apache-2.0
"""The index from chunk keys to cached KV, in order of last use."""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto

from cache.hashing import CacheScope, ChunkHash
from cache.layout import TokenIds


class EntryState(Enum):
    """Life of a cached segment: its KV is being computed, can be loaded, or is not to be used again."""

    FILLING = auto()
    READY = auto()
    DETACHED = auto()


@dataclass(frozen=True, slots=True)
class SegmentIdentity:
    """What a key stands for, kept so that a hash collision is a miss: the tokens, those before them, the scope."""

    scope: CacheScope
    prefix_ids: TokenIds
    token_ids: TokenIds


@dataclass(slots=True, eq=False)
class ChunkKVCache:
    """One segment's KV in the pool.

    ``being_written`` holds from the plan until its fill request has ended: pages are not reused before.
    ``tag`` is unique to this fill: workers write it on each page that they save, and refuse to load a page that
    carries another. ``leases`` counts the requests that may still load the segment.
    """

    key: ChunkHash
    identity: SegmentIdentity
    pages: list[int]
    tag: int
    state: EntryState = EntryState.FILLING
    being_written: bool = True
    leases: int = 0


class ChunkHashIndex:
    """Maps keys to entries; least recently used first."""

    def __init__(self) -> None:
        self._entries: OrderedDict[ChunkHash, ChunkKVCache] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[ChunkKVCache]:
        return iter(self._entries.values())

    def get(self, key: ChunkHash, identity: SegmentIdentity) -> ChunkKVCache | None:
        """The entry of ``key``. ``None`` if absent, or if the key collides with another's."""
        entry = self._entries.get(key)
        return entry if entry is not None and entry.identity == identity else None

    def touch(self, entry: ChunkKVCache) -> None:
        """Marks ``entry``, which the index holds, as used now."""
        self._entries.move_to_end(entry.key)

    def put(self, entry: ChunkKVCache) -> ChunkKVCache | None:
        """Adds ``entry`` as most recently used; returns the entry that it displaced (a hash collision)."""
        displaced = self._entries.pop(entry.key, None)
        self._entries[entry.key] = entry
        return displaced

    def remove(self, entry: ChunkKVCache) -> None:
        """Removes ``entry`` if the index still holds it (and not another entry of the same key)."""
        if self._entries.get(entry.key) is entry:
            del self._entries[entry.key]
