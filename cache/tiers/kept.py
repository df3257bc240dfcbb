# SPDX-License-Identifier: Apache-2.0
"""Memory for files that is used again.

A copy into memory that a process touches for the first time takes several times as long.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

_MOST: Final = 4


class KeptMemory:
    """Lends memory to threads. Keeps at most four pieces, as long as the files that were in them."""

    def __init__(self, allocate: Callable[[int], memoryview] | None = None) -> None:
        """``allocate`` gives memory, pinned for instance."""
        self._allocate = allocate or (lambda size: memoryview(bytearray(size)))
        self._kept: list[memoryview] = []
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> memoryview:
        """At least so many writable bytes, with what was in them; :meth:`give` them back, or let go of them."""
        with self._lock:
            kept = self._kept.pop() if self._kept else None
        return kept if kept is not None and len(kept) >= num_bytes else self._allocate(num_bytes)

    def give(self, memory: memoryview) -> None:
        """Takes memory back, which nobody uses any more."""
        with self._lock:
            if len(self._kept) < _MOST:
                self._kept.append(memory)

    @contextmanager
    def lend(self, num_bytes: int) -> Iterator[memoryview]:
        """Exactly so many writable bytes, within the block."""
        memory = self.take(num_bytes)
        try:
            yield memory[:num_bytes]
        finally:
            self.give(memory)
