# SPDX-License-Identifier: Apache-2.0
"""Windows: short runs of a chunk's tokens that a request computes anew, behind everything before them."""

from collections.abc import Sequence
from dataclasses import dataclass

from cache.positions.layout import Place
from cache.sparse import by_attention


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


def recomputed_tokens(share: float, chunks: Sequence[Place]) -> int:
    """The number of tokens that is a ``share`` of all tokens of ``chunks``."""
    return int(share * sum(chunk.length for chunk in chunks))


def choose_windows(
    attention: Sequence[float], chunks: Sequence[Place], budget: int, window_tokens: int
) -> list[tuple[int, int]]:
    """Choose the windows of ``chunks`` that get most attention, as many as ``budget`` tokens can be.

    ``attention`` is that of each token from the first chunk on, also of those between chunks. Windows start at each
    chunk's first token; its last one may be shorter. Returns first and end of runs of adjacent windows, as indices in
    the sequence, in its order.
    """
    offset = chunks[0].start
    windows = [
        (first, min(first + window_tokens, chunk.start + chunk.length))
        for chunk in chunks
        for first in range(chunk.start, chunk.start + chunk.length, window_tokens)
    ]
    totals = [sum(attention[first - offset : end - offset]) for first, end in windows]
    chosen = []
    for number in by_attention(totals):
        first, end = windows[number]
        if end - first <= budget:
            chosen.append((first, end))
            budget -= end - first
    runs: list[tuple[int, int]] = []
    starts = {chunk.start for chunk in chunks}
    for first, end in sorted(chosen):
        if runs and runs[-1][1] == first and first not in starts:
            runs[-1] = (runs[-1][0], end)
        else:
            runs.append((first, end))
    return runs
