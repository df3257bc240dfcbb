# SPDX-License-Identifier: Apache-2.0
"""The books of a manager: which pages are owned, leased, being filled or pinned."""

import itertools
from collections import Counter
from collections.abc import Iterator, Set
from dataclasses import dataclass

from cache.config import ChunkCacheConfig
from cache.errors import IntegrityError
from cache.eviction.pins import Pins
from cache.eviction.quotas import Usage
from cache.lease import Lease
from cache.pool import ChunkBlockPool
from cache.segments.index import ChunkHashIndex, ChunkKVCache, EntryState


@dataclass(frozen=True, slots=True)
class Books:
    """A view of the manager's state, which only the manager changes. ``detached`` entries still have their pages."""

    config: ChunkCacheConfig
    pool: ChunkBlockPool
    index: ChunkHashIndex
    usage: Usage
    pins: Pins
    leases: Set[Lease]
    filling: Set[ChunkKVCache]
    detached: Set[ChunkKVCache]

    def check(self) -> None:
        """Raises :class:`IntegrityError` unless every page has one owner and every lease is accounted for."""
        for problem in self._problems():
            raise IntegrityError(problem)

    def occupancy(self) -> dict[str, int]:
        """Sizes, in pages, segments and leases."""
        return {
            "pages_total": self.config.num_pages,
            "pages_free": self.pool.num_free,
            "pages_leased": sum(entry.num_pages for entry in self._leased() if not entry.detached),
            "pages_pinned": self.pins.num_pages,
            "page_tokens": self.config.page_tokens,
            "segments": len(self.index),
            "segments_filling": len(self.filling),
            "segments_detached": len(self.detached),
            "leases": len(self.leases),
        }

    def num_pages_held(self) -> int:
        """Pages that can't be freed for others now: pinned, leased, or being computed."""
        held = self._leased() | self.filling | self.detached
        return self.pins.num_pages + sum(entry.num_pages for entry in held if not entry.pinned)

    def available_pages(self, sparing: Set[ChunkKVCache]) -> int:
        """Pages that are free or can be freed by evictions, except of entries in ``sparing``."""
        held = self._leased() | self.filling | self.detached | sparing
        pinned = self.pins.num_pages - sum(entry.num_pages for entry in held if entry.pinned)
        return self.config.num_pages - sum(entry.num_pages for entry in held) - pinned

    def _leased(self) -> set[ChunkKVCache]:
        return {segment.entry for lease in self.leases for segment in lease.segments}

    def _problems(self) -> Iterator[str]:
        entries, num_pages = [*self.index, *self.detached], self.config.num_pages
        owned = list(itertools.chain.from_iterable(entry.pages for entry in entries))
        free = self.pool.free_pages()
        if len(owned) + len(free) != num_pages or len(set(owned) | free) != num_pages:
            yield f"{len(owned)} pages owned and {len(free)} free of {num_pages}"
        leases = Counter(segment.entry.tag for lease in self.leases for segment in lease.segments)
        if leases != Counter({entry.tag: entry.leases for entry in entries if entry.leases}):
            yield f"segments leased are {leases}, but entries count {[entry.leases for entry in entries]}"
        if self.filling != {entry for entry in entries if entry.state is EntryState.FILLING}:
            yield f"{len(self.filling)} fills are under way, but entries say otherwise"
        if any(entry.detached or entry.state is EntryState.FAILED for entry in self.index):
            yield "the index finds an entry that was detached"
        if self.usage != Usage.of_entries(entries):
            yield "the pages and segments counted for owners are not theirs"
        if self.pins.num_pages != sum(entry.num_pages for entry in self.index if entry.pinned):
            yield f"{self.pins.num_pages} pages are pinned, but entries say otherwise"
