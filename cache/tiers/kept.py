# SPDX-License-Identifier: Apache-2.0
"""Memory for files that is used again.

A copy into memory that a process touches for the first time takes several times as long.
"""

import weakref
from collections import deque
from collections.abc import Callable
from typing import Final

import numpy as np

_MOST: Final = 8


class KeptMemory:
    """Gives memory to threads, and gives it again once nobody refers to it. Keeps at most eight pieces."""

    def __init__(self, allocate: Callable[[int], memoryview] | None = None) -> None:
        """``allocate`` gives memory, pinned for instance."""
        self._allocate = allocate or (lambda size: memoryview(bytearray(size)))
        # A deque needs no lock, which a finalizer that runs during a call would wait for in vain.
        self._kept = deque[memoryview](maxlen=_MOST)

    def take(self, num_bytes: int) -> memoryview:
        """Return a writable buffer with stale contents, lent until its last view is gone."""
        try:
            memory = self._kept.pop()
        except IndexError:
            memory = memoryview(bytearray())
        if len(memory) < num_bytes:
            memory = self._allocate(num_bytes)
        lent = np.frombuffer(memory, np.uint8, num_bytes)
        weakref.finalize(lent, self._kept.append, memory).atexit = False
        return memoryview(lent.data)
