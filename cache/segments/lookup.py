# SPDX-License-Identifier: Apache-2.0
"""Looking up a prompt's segments."""

from dataclasses import dataclass
from typing import NamedTuple

from cache.config import ChunkCacheConfig
from cache.positions.layout import ChunkedPrompt, pack
from cache.segments.hashing import CacheScope, ChunkHash, ChunkHasher
from cache.segments.index import ChunkHashIndex, ChunkKVCache, EntryState, SegmentIdentity


class Wanted(NamedTuple):
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

    segments: list[Wanted]
    pages_needed: int
    """For the segments that are missing, each distinct one once; likewise ``num_missing``."""
    num_missing: int

    @property
    def entries(self) -> set[ChunkKVCache]:
        """The entries found."""
        return {wanted.entry for wanted in self.segments if wanted.entry is not None}

    @property
    def is_ambiguous(self) -> bool:
        """Whether two segments of the prompt have the same key."""
        identities = {wanted.key: wanted.identity for wanted in self.segments}
        return any(identities[wanted.key] != wanted.identity for wanted in self.segments)


def look_up(
    prompt: ChunkedPrompt, scope: CacheScope, hasher: ChunkHasher, index: ChunkHashIndex, config: ChunkCacheConfig
) -> Lookup:
    """Looks up the system segment (if not empty) and each chunk."""
    system, prefix = pack(prompt.system), pack(prompt.chunk_prefix)
    system_key, prefix_key = hasher.system_key(scope, system), hasher.system_key(scope, prefix)
    names = [(system_key, SegmentIdentity(scope, b"", system), True)] if system else []
    chunks = [chunk.packed for chunk in prompt.chunks]
    for key, tokens in zip(hasher.chunk_keys(scope, prefix_key, chunks), chunks, strict=True):
        names.append((key, SegmentIdentity(scope, prefix, tokens), False))
    segments = [Wanted(key, identity, is_system, index.get(key, identity)) for key, identity, is_system in names]
    missing = {wanted.key: wanted.identity for wanted in segments if wanted.entry is None}
    return Lookup(segments, sum(config.pages_for(identity.num_tokens) for identity in missing.values()), len(missing))


@dataclass(frozen=True, slots=True)
class Fit:
    """A way to hold a prompt's segments: the lookup, and the entries to evict."""

    found: Lookup
    evicted: list[ChunkKVCache]
