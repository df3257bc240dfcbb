# SPDX-License-Identifier: Apache-2.0
"""Checks of a manager's books; each raises :class:`IntegrityError`."""

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence, Set

from cache.errors import IntegrityError
from cache.index import ChunkKVCache, EntryState
from cache.lease import Lease
from cache.pool import ChunkBlockPool
from cache.quotas import Usage


def check_pages(num_pages: int, pool: ChunkBlockPool, entries: Sequence[ChunkKVCache]) -> None:
    """Each page is free or has one owner."""
    owned = list(itertools.chain.from_iterable(entry.pages for entry in entries))
    free = pool.free_pages()
    if len(owned) + len(free) != num_pages or len(set(owned) | free) != num_pages:
        raise IntegrityError(f"{len(owned)} pages owned and {len(free)} free of {num_pages}")


def check_leases(leases: Iterable[Lease], entries: Sequence[ChunkKVCache]) -> None:
    """Entries count as many leases as there are."""
    counted = Counter(segment.entry.tag for lease in leases for segment in lease.segments)
    if counted != Counter({entry.tag: entry.leases for entry in entries if entry.leases}):
        raise IntegrityError(f"segments leased are {counted}, but entries count {[e.leases for e in entries]}")


def check_fills(filling: Set[ChunkKVCache], entries: Sequence[ChunkKVCache]) -> None:
    """Entries are being filled exactly if a fill is under way."""
    if filling != {entry for entry in entries if entry.state is EntryState.FILLING}:
        raise IntegrityError(f"{len(filling)} fills are under way, but entries say otherwise")


def check_index(index: Iterable[ChunkKVCache], pinned_pages: int) -> None:
    """The index finds no detached entry, and its pinned pages are counted."""
    entries = list(index)
    if any(entry.detached or entry.state is EntryState.FAILED for entry in entries):
        raise IntegrityError("the index finds an entry that was detached")
    if pinned_pages != sum(entry.num_pages for entry in entries if entry.pinned):
        raise IntegrityError(f"{pinned_pages} pages are pinned, but entries say otherwise")


def check_usage(usage: Usage, entries: Iterable[ChunkKVCache]) -> None:
    """Each owner's pages and segments are counted."""
    counted = Usage()
    for entry in entries:
        counted.add(entry)
    if counted != usage:
        raise IntegrityError("the pages and segments counted for owners are not theirs")
