# SPDX-License-Identifier: Apache-2.0
"""Choice of entries to evict."""

from collections.abc import Set

from cache.eviction import EvictionPolicy
from cache.index import ChunkKVCache, EntryState


def victims(
    policy: EvictionPolicy[ChunkKVCache], pages: int, segments: int, spared: Set[ChunkKVCache], owner: str | None = None
) -> list[ChunkKVCache] | None:
    """Entries (of ``owner``, if given) with so many pages and segments to give up; ``None`` if there are too few.

    Entries that are leased, being filled or ``spared`` stay.
    """
    chosen: list[ChunkKVCache] = []
    if max(pages, segments) <= 0:
        return chosen
    for entry in policy.victims():
        is_free = entry.state is EntryState.READY and not entry.leases and entry not in spared
        if is_free and owner in (None, entry.identity.scope.owner):
            chosen.append(entry)
            pages, segments = pages - entry.num_pages, segments - 1
            if max(pages, segments) <= 0:
                return chosen
    return None
