# SPDX-License-Identifier: Apache-2.0
"""Results of looking up a prompt's segments."""

from dataclasses import dataclass
from typing import NamedTuple

from cache.hashing import ChunkHash
from cache.index import ChunkKVCache, SegmentIdentity


class Wanted(NamedTuple):
    """One segment of a prompt: its key, the key's meaning, and its entry if there is one."""

    key: ChunkHash
    identity: SegmentIdentity
    is_system: bool
    entry: ChunkKVCache | None


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


@dataclass(frozen=True, slots=True)
class Fit:
    """How the pool can hold a prompt's segments: those found, and the entries to evict for the others."""

    found: Lookup
    evicted: list[ChunkKVCache]
