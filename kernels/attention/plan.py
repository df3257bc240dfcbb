# SPDX-License-Identifier: Apache-2.0
"""Attention over segments in the pool, at any position of a request.

RoPE depends on differences of positions only: ``q . R(d) k = R(-d) q . k``. So a segment's keys are not rotated to
their place in a request; the request's queries are turned by as many positions the other way. A segment is read where
it is, once for all tokens of a step that attend to it.

A token attends to its request's segments, and to the request's own tokens from the question on, in the engine's blocks.
Own tokens may be windows of the context, too: each is a row that sees what precedes it, earlier windows included.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from kernels.rope import AngleTables

POOL, BLOCKS = 0, 1
"""Sources of keys and values."""


Run = tuple[int, int, int]
"""Consecutive tokens: their page or block, the first one's place in it, their number."""


def runs_of(pages: Sequence[int], page_tokens: int, skipped: int, length: int) -> tuple[Run, ...]:
    """The runs of ``length`` tokens in ``pages`` of ``page_tokens`` each, behind ``skipped`` others."""
    runs, end = [], skipped + length
    for start, page in enumerate(pages):
        first, last = max(start * page_tokens, skipped), min((start + 1) * page_tokens, end)
        if last > first:
            runs.append((page, first - start * page_tokens, last - first))
    return tuple(runs)


@dataclass(frozen=True, slots=True)
class Segment:
    """``length`` tokens of one source, all of them seen, whose keys are ``delta`` positions before their place."""

    runs: tuple[Run, ...]
    length: int
    delta: int
    source: int = POOL


@dataclass(frozen=True, slots=True)
class Tail:
    """The ``length`` tokens of a request that lie in the engine's blocks."""

    runs: tuple[Run, ...]
    length: int


class AttendingRow(NamedTuple):
    """One request's tokens in a step.

    They are ``[first, first + num_tokens)`` of all, and the last of its tail.
    """

    first: int
    num_tokens: int
    segments: Sequence[Segment]
    tail: Tail


@dataclass(frozen=True)
class AttentionPlan:
    """The attention of one step, the same for all layers; int64 tensors on the CPU.

    ``tokens`` ``[n]``: the step's tokens that the plan computes. ``pieces`` ``[p, 5]``: source, first and end of its
    runs, first and end of its users; ``runs`` ``[r, 3]``: page or block, first token in it, number of tokens; ``users``
    ``[u, 3]``: index in ``tokens``, index in ``deltas``, number of the piece's tokens that it sees.
    """

    tokens: Tensor
    pieces: Tensor
    runs: Tensor
    users: Tensor
    deltas: Tensor
    angles: AngleTables = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "angles", AngleTables(self.deltas))


class ChunkAttention(ABC):
    """Computes the attention of some of a step's tokens, layer by layer."""

    name: ClassVar[str]

    @abstractmethod
    def attend(self, number: int, query: Tensor, output: Tensor, plan: AttentionPlan, scale: float) -> None:
        """Writes ``output[plan.tokens]`` in layer ``number``.

        ``query`` and ``output`` are ``[tokens, heads, D]``; queries are at the positions of their tokens' indices, and
        logits are multiplied by ``scale``.
        """


def plan_step(rows: Sequence[AttendingRow]) -> AttentionPlan:
    """Groups what the rows attend to: each distinct segment once, with all of its users."""
    deltas: dict[int, int] = {0: 0}
    whole: dict[tuple[object, ...], _Piece] = {}
    tokens: list[int] = []
    tails = []
    for first, count, segments, tail in rows:
        places = range(len(tokens), len(tokens) + count)
        tokens += range(first, first + count)
        uses: Counter[tuple[object, ...]] = Counter()
        for segment in segments:
            # A request's second use of a segment is a piece of its own: a piece has each token at most once.
            place = segment.source, segment.runs
            uses[place] += 1
            turn = deltas.setdefault(segment.delta, len(deltas))
            piece = whole.setdefault((*place, uses[place]), _Piece(segment.source, segment.runs, []))
            piece.users.extend([(token, turn, segment.length) for token in places])
        seen = tail.length - count + 1
        tails.append(_Piece(BLOCKS, tail.runs, [(place, 0, seen + i) for i, place in enumerate(places)]))
    table, runs, users = _flat([*whole.values(), *tails])
    return AttentionPlan(torch.tensor(tokens), table, runs, users, torch.tensor(list(deltas)))


class _Piece(NamedTuple):
    """Keys and values of one source, and the tokens that attend to them."""

    source: int
    runs: tuple[Run, ...]
    users: list[tuple[int, int, int]]


def _flat(pieces: Sequence[_Piece]) -> tuple[Tensor, Tensor, Tensor]:
    """``pieces``, ``runs`` and ``users`` of a plan."""
    runs = list(accumulate((len(piece.runs) for piece in pieces), initial=0))
    users = list(accumulate((len(piece.users) for piece in pieces), initial=0))
    table = [(piece.source, runs[i], runs[i + 1], users[i], users[i + 1]) for i, piece in enumerate(pieces)]
    return (
        torch.tensor(table),
        torch.tensor([run for piece in pieces for run in piece.runs]),
        torch.tensor([user for piece in pieces for user in piece.users]),
    )
