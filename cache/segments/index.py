# SPDX-License-Identifier: Apache-2.0
"""Segments of prompts: what their keys mean, and what finds their cached KV by key, and by the time it expires."""

import heapq
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, NamedTuple

from cache.config import ChunkCacheConfig
from cache.positions.layout import ChunkedPrompt, PackedTokens, TokenIds, pack, packed_length, unpack
from cache.segments.hashing import CacheScope, ChunkHash, ChunkHasher

_OFFSET: Final = time.time() - time.monotonic()


def now() -> float:
    """Seconds since the epoch: the system's clock when the process started, plus the time since.

    Setting the system's clock does not change it: durations stay right, dates as wrong as at the start.
    """
    return _OFFSET + time.monotonic()


class EntryState(Enum):
    """State of a segment's KV: being computed, loadable, never saved, or in tiers only."""

    FILLING = auto()
    READY = auto()
    FAILED = auto()
    STORED = auto()


class SegmentIdentity(NamedTuple):
    """The meaning of a key: scope, tokens before the segment, and its tokens. A hash collision is thus a miss.

    Tokens are packed (:func:`cache.positions.layout.pack`), so that comparing is comparing memory.
    """

    scope: CacheScope
    prefix: PackedTokens
    tokens: PackedTokens

    @property
    def owner(self) -> str:
        """The namespace, without a client's own salt."""
        return self.scope.owner

    @property
    def prefix_ids(self) -> TokenIds:
        """The tokens before the segment, where it was computed."""
        return unpack(self.prefix)

    @property
    def token_ids(self) -> TokenIds:
        """The segment's own tokens."""
        return unpack(self.tokens)

    @property
    def num_prefix_tokens(self) -> int:
        """Number of tokens before the segment, where it was computed."""
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
    created_at: float
    """Seconds since the epoch; likewise ``last_used_at`` and ``expires_at``."""
    last_used_at: float
    is_system: bool
    state: EntryState = EntryState.FILLING
    detached: bool = False
    """Not in the index; holders of a lease may still load it."""
    leases: int = 0
    hits: int = 0
    pinned: bool = False
    """Never evicted."""
    expires_at: float | None = None
    tiers: tuple[str, ...] = ()
    """Names of the tiers that have it, the fastest first, as far as is known."""

    @property
    def num_pages(self) -> int:
        """Number of pages in the pool."""
        return len(self.pages)

    @property
    def num_tokens(self) -> int:
        """Length of the segment."""
        return self.identity.num_tokens

    @property
    def owner(self) -> str:
        """The namespace, without a client's own salt."""
        return self.identity.owner


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
        """The entry of ``key``, whatever its identity."""
        return self._entries.get(key)

    def put(self, entry: ChunkKVCache) -> ChunkKVCache | None:
        """Adds ``entry``; returns the entry that it displaced (a hash collision)."""
        displaced = self._entries.pop(entry.key, None)
        self._entries[entry.key] = entry
        return displaced

    def remove(self, entry: ChunkKVCache) -> None:
        """Removes ``entry``, unless the index holds another entry of its key."""
        if self._entries.get(entry.key) is entry:
            del self._entries[entry.key]


class PromptSegment(NamedTuple):
    """One segment of a prompt: its key, the key's meaning, and its entry if there is one."""

    key: ChunkHash
    identity: SegmentIdentity
    is_system: bool
    entry: ChunkKVCache | None

    @property
    def num_tokens(self) -> int:
        """Length of the segment."""
        return self.identity.num_tokens

    @property
    def is_loadable(self) -> bool:
        """Whether its KV is in the pool."""
        return self.entry is not None and self.entry.state is EntryState.READY


@dataclass(frozen=True, slots=True)
class Lookup:
    """A prompt's segments, found or missing."""

    segments: list[PromptSegment]
    pages_needed: int
    """For the segments that are missing, each distinct one once; likewise ``num_missing``."""
    num_missing: int

    @property
    def entries(self) -> set[ChunkKVCache]:
        """The entries found."""
        return {segment.entry for segment in self.segments if segment.entry is not None}

    @property
    def is_ambiguous(self) -> bool:
        """Whether two segments of the prompt have the same key."""
        identities = {segment.key: segment.identity for segment in self.segments}
        return any(identities[segment.key] != segment.identity for segment in self.segments)


def look_up(
    prompt: ChunkedPrompt, scope: CacheScope, hasher: ChunkHasher, index: ChunkHashIndex, config: ChunkCacheConfig
) -> Lookup:
    """Looks up the system segment (if not empty) and each chunk."""
    prefix = system = pack(prompt.system)
    prefix_key = system_key = hasher.system_key(scope, system)
    if prompt.opening is not None:
        prefix = pack(prompt.opening)
        prefix_key = hasher.system_key(scope, prefix)
    names = [(system_key, SegmentIdentity(scope, b"", system), True)] if system else []
    keys = hasher.chunk_keys(scope, prefix_key, [chunk.packed for chunk in prompt.chunks])
    for key, chunk in zip(keys, prompt.chunks, strict=True):
        before = prefix
        if chunk.context:
            before += chunk.context
            (key,) = hasher.chunk_keys(scope, hasher.system_key(scope, before), [chunk.packed])
        names.append((key, SegmentIdentity(scope, before, chunk.packed), False))
    segments = [PromptSegment(key, identity, is_system, index.get(key, identity)) for key, identity, is_system in names]
    missing = {segment.key: segment.identity for segment in segments if segment.entry is None}
    return Lookup(segments, sum(config.pages_for(identity.num_tokens) for identity in missing.values()), len(missing))


@dataclass(frozen=True, slots=True)
class Fit:
    """A way to hold a prompt's segments: the lookup, and the entries to evict."""

    found: Lookup
    evicted: list[ChunkKVCache]


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
