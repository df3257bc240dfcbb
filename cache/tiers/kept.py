# SPDX-License-Identifier: Apache-2.0
"""Memory for files that is used again.

A copy into memory that a process touches for the first time takes several times as long.
"""

import weakref
from collections import deque
from collections.abc import Callable
from typing import Final

import numpy as np

from cache.tiers.slabs import Slabs

_MOST: Final = 8
STAGED_BYTES: Final = 256 << 20
"""Pinned memory for files on their way; a chunk of 512 tokens of an 8B model takes a quarter."""


class KeptMemory:
    """Gives memory to threads, and gives it again once nobody refers to it. Keeps at most eight ordinary pieces."""

    def __init__(self, allocate: Callable[[int], memoryview] | None = None) -> None:
        """``allocate`` gives memory that is better than ordinary, pinned for instance.

        It is called here only, for :data:`STAGED_BYTES`; what does not fit in them gets ordinary memory.
        """
        self._slabs = None if allocate is None else Slabs(STAGED_BYTES, allocate)
        # A deque needs no lock, which a finalizer that runs during a call would wait for in vain.
        self._kept = deque[memoryview](maxlen=_MOST)

    def take(self, num_bytes: int) -> memoryview:
        """Return a writable buffer with stale contents, lent until its last view is gone."""
        if self._slabs is not None and (staged := self._slabs.take(num_bytes)) is not None:
            return staged
        try:
            memory = self._kept.pop()
        except IndexError:
            memory = memoryview(bytearray())
        if len(memory) < num_bytes:
            memory = memoryview(bytearray(num_bytes))
        lent = np.frombuffer(memory, np.uint8, num_bytes)
        weakref.finalize(lent, self._kept.append, memory).atexit = False
        return memoryview(lent.data)
