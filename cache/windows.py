# SPDX-License-Identifier: Apache-2.0
"""Windows: short runs of a chunk's tokens that a request computes anew, behind everything before them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from cache.positions.layout import Place

WINDOW_TOKENS: Final = 32
"""Windows start at each chunk's first token; the last one of a chunk may be shorter."""


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens ``[start, start + length)`` of a sequence, logically from ``position`` on."""

    start: int
    length: int
    position: int

    @property
    def end(self) -> int:
        """One past the last token."""
        return self.start + self.length


def choose_windows(attention: Sequence[float], chunks: Sequence[Place], share: float) -> list[tuple[int, int]]:
    """Choose the windows that get most attention, until they have a ``share`` of the tokens of ``chunks``.

    ``attention`` is that of each token of all chunks in a row. Returns first and end of runs of adjacent windows, as
    indices in the sequence, in its order.
    """
    offset = chunks[0].start
    windows = [
        (first, min(first + WINDOW_TOKENS, chunk.start + chunk.length))
        for chunk in chunks
        for first in range(chunk.start, chunk.start + chunk.length, WINDOW_TOKENS)
    ]
    totals = [sum(attention[first - offset : end - offset]) for first, end in windows]
    left, chosen = int(share * sum(chunk.length for chunk in chunks)), []
    for number in sorted(range(len(windows)), key=lambda number: (-totals[number], number)):
        first, end = windows[number]
        if end - first <= left:
            chosen.append((first, end))
            left -= end - first
    return _joined(sorted(chosen), {chunk.start for chunk in chunks})


def _joined(windows: Sequence[tuple[int, int]], starts: set[int]) -> list[tuple[int, int]]:
    """Join windows that follow one another in a chunk."""
    if not windows:
        return []
    cuts = [0, *(i for i, ((_, end), (first, _)) in enumerate(pairwise(windows), 1) if end != first or first in starts)]
    return [(windows[cut][0], windows[after - 1][1]) for cut, after in pairwise([*cuts, len(windows)])]
