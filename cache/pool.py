# SPDX-License-Identifier: Apache-2.0
"""Page allocation of the chunk pool. The memory itself lives with the engine's workers."""

from collections.abc import Iterator
from itertools import compress, islice


class ChunkBlockPool:
    """Hands out page numbers ``0 .. num_pages - 1``; each page is free or owned by exactly one caller.

    Not thread-safe: one event loop owns it.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.num_free = num_pages
        """Pages that :meth:`allocate` could hand out now."""
        self.num_changes = 0
        """How often pages were handed out or given back."""
        self._is_free = bytearray(b"\x01" * num_pages)

    def allocate(self, num_pages: int) -> list[int]:
        """``num_pages`` pages in ascending order; raises ``MemoryError``, taking none, if fewer are free.

        They lie side by side if so many do: workers copy a run of pages at once.
        """
        if num_pages > self.num_free:
            raise MemoryError(f"{num_pages} pages wanted, {self.num_free} of {self.num_pages} free")
        first = self._is_free.find(b"\x01" * num_pages)
        pages = list(range(first, first + num_pages)) if first >= 0 else list(islice(self._free_pages(), num_pages))
        for page in pages:
            self._is_free[page] = 0
        self.num_free -= num_pages
        self.num_changes += 1
        return pages

    def free(self, pages: list[int]) -> None:
        """Gives pages back; raises ``ValueError``, freeing none, if one of them is not allocated."""
        if len(set(pages)) != len(pages) or any(self._is_free[page] for page in pages):
            raise ValueError(f"pages freed twice: {pages}")
        for page in pages:
            self._is_free[page] = 1
        self.num_free += len(pages)
        self.num_changes += 1

    def free_pages(self) -> set[int]:
        """The free pages, for integrity checks."""
        return set(self._free_pages())

    def _free_pages(self) -> Iterator[int]:
        return compress(range(self.num_pages), self._is_free)
