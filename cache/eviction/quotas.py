# SPDX-License-Identifier: Apache-2.0
"""How much of the pool each owner of namespaces has, and may have."""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

from cache.segments.index import ChunkKVCache


class Quota(NamedTuple):
    """Most of the pool that one owner may have; ``None`` is no limit."""

    pages: int | None = None
    segments: int | None = None


def unlimited(owner: str) -> Quota:
    """No limit for any owner."""
    return Quota()


class Usage:
    """Pages and segments by owner, including segments that are detached but still in use."""

    def __init__(self, quota_of: Callable[[str], Quota] = unlimited) -> None:
        self._quota_of = quota_of
        self._pages: Counter[str] = Counter()
        self._segments: Counter[str] = Counter()

    @classmethod
    def of_entries(cls, entries: Iterable[ChunkKVCache]) -> "Usage":
        """Usage by these entries, without quotas."""
        usage = cls()
        for entry in entries:
            usage.add(entry)
        return usage

    def add(self, entry: ChunkKVCache) -> None:
        owner = entry.owner
        self._pages[owner] += entry.num_pages
        self._segments[owner] += 1

    def remove(self, entry: ChunkKVCache) -> None:
        owner = entry.owner
        self._pages[owner] -= entry.num_pages
        self._segments[owner] -= 1
        if not self._segments[owner]:
            del self._pages[owner], self._segments[owner]

    def __eq__(self, other: object) -> bool:
        """Whether both count the same pages and segments."""
        return isinstance(other, Usage) and (self._pages, self._segments) == (other._pages, other._segments)

    def of(self, owner: str) -> tuple[int, int]:
        """Pages and segments that ``owner`` has."""
        return self._pages[owner], self._segments[owner]

    def surplus(self, owner: str, pages: int, segments: int) -> tuple[int, int]:
        """Pages and segments that ``owner`` must give up for new ones; 0 or less: none."""
        quota = self._quota_of(owner)
        return (
            0 if quota.pages is None else self._pages[owner] + pages - quota.pages,
            0 if quota.segments is None else self._segments[owner] + segments - quota.segments,
        )
