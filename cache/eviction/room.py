# SPDX-License-Identifier: Apache-2.0
"""Room for missing segments: which entries to evict."""

from collections.abc import Set

from cache.books import Books
from cache.errors import CapacityError
from cache.eviction.policies import EvictionPolicy
from cache.segments.index import ChunkKVCache, EntryState, Lookup


class Room:
    """Chooses entries to evict, in the order of ``policy``; evicts none."""

    def __init__(self, policy: EvictionPolicy[ChunkKVCache], books: Books) -> None:
        self._policy = policy
        self._books = books

    def evictions(self, found: Lookup, owner: str, more_pages: int = 0, more_segments: int = 0) -> list[ChunkKVCache]:
        """Entries to evict until the missing segments, and more pages and segments, fit.

        Found entries are spared. An owner that would exceed its quota makes room for itself first. Raises
        :class:`CapacityError`.
        """
        usage, pool = self._books.usage, self._books.pool
        num_pages, spared = found.pages_needed + more_pages, found.entries
        own = self._victims(*usage.surplus(owner, num_pages, found.num_missing + more_segments), spared, owner)
        if own is None:
            raise CapacityError(f"the chunks need more than what {owner!r} may have of the pool")
        free = pool.num_free + sum(entry.num_pages for entry in own)
        others = self._victims(num_pages - free, 0, spared | set(own))
        if others is None:
            raise CapacityError(self._message(found, num_pages))
        return [*own, *others]

    def _victims(
        self, pages: int, segments: int, spared: Set[ChunkKVCache], owner: str | None = None
    ) -> list[ChunkKVCache] | None:
        """Entries (of ``owner``, if given) with enough pages and segments; ``None`` if there are too few."""
        victims: list[ChunkKVCache] = []
        if max(pages, segments) <= 0:
            return victims
        for entry in self._policy.victims():
            is_free = entry.state is EntryState.READY and not entry.leases and entry not in spared
            if is_free and owner in (None, entry.owner):
                victims.append(entry)
                pages, segments = pages - entry.num_pages, segments - 1
                if max(pages, segments) <= 0:
                    return victims
        return None

    def _message(self, found: Lookup, pages_needed: int) -> str:
        config = self._books.config
        total, page = config.num_pages, config.page_tokens
        longest = max(wanted.num_tokens for wanted in found.segments)
        if config.pages_for(longest) > total:
            return f"a segment of {longest} tokens is longer than the chunk pool of {total * page} tokens"
        available = self._books.available_pages(found.entries)
        return f"the chunks need {pages_needed} more pages of {page} tokens; {available} of {total} can be freed"
