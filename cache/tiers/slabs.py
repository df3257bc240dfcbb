# SPDX-License-Identifier: Apache-2.0
"""Host memory that is allocated once and lent in pieces.

Pinning memory takes the driver's lock for tens of milliseconds, in which the engine launches nothing, and PyTorch's
allocator of pinned memory rounds up to powers of two and gives nothing back to the system.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

_SMALLEST: Final = 1 << 12
"""Bytes of a slab, at least; what is left over of a size is not allocated."""
_ALIGNMENT: Final = 64


class _Piece(NamedTuple):
    """Bytes ``[start, end)`` of a slab."""

    slab: int
    start: int
    end: int


class Slabs:
    """At most ``num_bytes`` bytes, in slabs whose sizes are powers of two.

    ``allocate`` gives the memory of a slab, pinned for instance, and is not called again.
    """

    def __init__(self, num_bytes: int, allocate: Callable[[int], memoryview]) -> None:
        self._slabs: list[NDArray[Any]] = [np.frombuffer(allocate(size), np.uint8) for size in _sizes(num_bytes)]
        self._lock = threading.Lock()
        self._gaps = [_Piece(number, 0, len(slab)) for number, slab in enumerate(self._slabs)]
        """Pieces that nobody has, in order; no two of them touch."""
        self.longest = max(map(len, self._slabs), default=0)
        """Bytes of the longest piece that there can be."""
        # A deque needs no lock, which a finalizer that runs during a call would wait for in vain.
        self._returned = deque[_Piece]()

    def take(self, num_bytes: int) -> memoryview | None:
        """A writable buffer with stale contents, lent until its last view is gone; ``None`` if no gap is as long."""
        with self._lock:
            if self._returned:
                self._gaps = _merged([*self._gaps, *(self._returned.popleft() for _ in range(len(self._returned)))])
            piece = self._cut(num_bytes)
        if piece is None:
            return None
        lent = np.frombuffer(self._slabs[piece.slab].data, np.uint8, num_bytes, piece.start)
        weakref.finalize(lent, self._returned.append, piece).atexit = False
        return memoryview(lent.data)

    def _cut(self, num_bytes: int) -> _Piece | None:
        """Takes a piece off the shortest gap that is long enough."""
        length = max(_ALIGNMENT, -(-num_bytes // _ALIGNMENT) * _ALIGNMENT)
        fitting = [gap for gap in self._gaps if gap.end - gap.start >= length]
        if not fitting:
            return None
        slab, start, end = gap = min(fitting, key=lambda each: each.end - each.start)
        at = self._gaps.index(gap)
        self._gaps[at : at + 1] = [_Piece(slab, start + length, end)] if start + length < end else []
        return _Piece(slab, start, start + length)


def _sizes(num_bytes: int) -> Iterator[int]:
    """Powers of two that are ``num_bytes`` together, but for less than the smallest slab."""
    while num_bytes >= _SMALLEST:
        size = 1 << (num_bytes.bit_length() - 1)
        yield size
        num_bytes -= size


def _merged(pieces: list[_Piece]) -> list[_Piece]:
    """The pieces in order, those that touch as one."""
    merged: list[_Piece] = []
    for piece in sorted(pieces):
        if merged and merged[-1].slab == piece.slab and merged[-1].end == piece.start:
            piece = merged.pop()._replace(end=piece.end)
        merged.append(piece)
    return merged
