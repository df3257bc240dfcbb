# SPDX-License-Identifier: Apache-2.0
"""Page allocation of the chunk pool. The memory itself lives with the engine's workers."""


class ChunkBlockPool:
    """Hands out page numbers ``0 .. num_pages - 1``; each page is free or owned by exactly one caller.

    Not thread-safe: one event loop owns it.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        # Taken from the end: pages freed last are warm in the CPU's caches.
        self._free = list(range(num_pages - 1, -1, -1))
        self._is_free = bytearray(b"\x01" * num_pages)

    @property
    def num_free(self) -> int:
        """Pages that :meth:`allocate` could hand out now."""
        return len(self._free)

    def allocate(self, num_pages: int) -> list[int]:
        """``num_pages`` pages in ascending order; raises ``MemoryError``, taking none, if fewer are free."""
        if num_pages > len(self._free):
            raise MemoryError(f"{num_pages} pages wanted, {len(self._free)} of {self.num_pages} free")
        split = len(self._free) - num_pages
        pages = self._free[split:]
        del self._free[split:]
        for page in pages:
            self._is_free[page] = 0
        return sorted(pages)

    def free(self, pages: list[int]) -> None:
        """Gives pages back; raises ``ValueError``, freeing none, if one of them is not allocated."""
        if len(set(pages)) != len(pages) or any(self._is_free[page] for page in pages):
            raise ValueError(f"pages freed twice: {pages}")
        for page in pages:
            self._is_free[page] = 1
        self._free.extend(reversed(pages))

    def free_pages(self) -> set[int]:
        """The free pages, for integrity checks."""
        return set(self._free)
