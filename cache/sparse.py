# SPDX-License-Identifier: Apache-2.0
"""Sparse requests: a few of a request's chunks, chosen by the attention that its question pays them."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sparse:
    """How much of a request's chunks is kept: so many tokens, and such a share of all tokens, at most.

    No more chunks are kept than get a share ``mass`` of the attention. ``closes_gaps``: they follow one another, as
    in a request that has no others; else their positions stay.
    """

    budget_tokens: int | None = None
    budget_share: float = 1.0
    mass: float = 1.0
    closes_gaps: bool = False

    def budget(self, num_tokens: int) -> int:
        """Tokens that are kept, at most, of chunks with ``num_tokens`` together."""
        share = int(self.budget_share * num_tokens)
        return share if self.budget_tokens is None else min(share, self.budget_tokens)


def by_attention(attention: Sequence[float]) -> list[int]:
    """Indices, the one with most attention first; of equal ones the first."""
    return sorted(range(len(attention)), key=lambda index: -attention[index])


def shares(attention: Sequence[float]) -> list[float]:
    """Each chunk's share of the attention to all of them, of what the question pays beyond one without content."""
    paid = [max(0.0, each) for each in attention]
    return [each / sum(paid) for each in paid] if any(paid) else [1 / len(paid)] * len(paid)


def choose(attention: Sequence[float], lengths: Sequence[int], sparse: Sparse) -> list[int]:
    """Indices of the chunks to keep, in order; ``attention`` is that to each of them, perhaps less than 0.

    Chunks are taken by their attention, the greatest first, as long as they fit the budget. The first one is taken in
    any case.
    """
    kept: list[int] = []
    left, mass, share = sparse.budget(sum(lengths)), 0.0, shares(attention)
    for index in by_attention(attention):
        if kept and sparse.mass < 1 and mass >= sparse.mass:
            break
        if not kept or lengths[index] <= left:
            kept.append(index)
            left -= lengths[index]
            mass += share[index]
    return sorted(kept)
