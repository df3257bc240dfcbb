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
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.rope import AngleTables

POOL, BLOCKS = 0, 1
"""Sources of keys and values."""


PREFILL_TOKENS = 48
"""Tokens of one request in a step from which on a kernel may compute them otherwise than few."""

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

    They are ``[first, first + num_tokens)`` of all, and the last of its tail. Beside the segments, they and their tail
    are ``turn`` positions before their place.
    """

    first: int
    num_tokens: int
    segments: Sequence[Segment]
    tail: Tail
    turn: int = 0


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


class Units(NamedTuple):
    """A plan's work in units, each some keys of a piece for some of its users; int64 tensors on the CPU.

    ``places`` ``[k]``: the keys of all runs, page or block in the bits from :data:`PLACE_BITS` on, token in it below.
    ``units`` ``[n, 5]``: source, first of its ``places``, their number, first of its ``entries``, their number.
    ``entries`` ``[e, 3]``: a user's token in the step, index in the plan's ``deltas``, number of the unit's keys that
    it sees, at least one. ``order`` ``[e]`` has the entries of the plan's token ``i`` from ``bounds[i]`` to
    ``bounds[i + 1]``.

    There may be too little room for the results of all entries: ``slices`` ``[s + 1, 3]`` has the first unit, entry and
    token of each slice, computed one after another, and the ends.
    """

    places: Tensor
    units: Tensor
    entries: Tensor
    order: Tensor
    bounds: Tensor
    slices: Tensor


PLACE_BITS = 32


class ChunkAttention(ABC):
    """Computes the attention of some of a step's tokens, layer by layer."""

    name: ClassVar[str]

    def plan(self, requests: Sequence[Sequence[AttendingRow]]) -> Any:
        """Plans a step's attention, the same for all layers, from the rows of each request."""
        return plan_step([row for rows in requests for row in rows])

    @abstractmethod
    def attend(self, number: int, query: Tensor, output: Tensor, plan: Any, scale: float) -> None:
        """Writes the outputs of the plan's tokens in layer ``number``.

        ``query`` and ``output`` are ``[tokens, heads, D]``; queries are at the positions of their tokens' indices, and
        logits are multiplied by ``scale``.
        """


def plan_step(rows: Sequence[AttendingRow]) -> AttentionPlan:
    """Groups what the rows attend to: each distinct segment once, with all of its users."""
    deltas: dict[int, int] = {0: 0}
    whole: dict[tuple[object, ...], _Piece] = {}
    tokens: list[int] = []
    tails = []
    for first, count, segments, tail, turned in rows:
        places = range(len(tokens), len(tokens) + count)
        tokens += range(first, first + count)
        uses: Counter[tuple[object, ...]] = Counter()
        for segment in segments:
            # A request's second use of a segment is a piece of its own: a piece has each token at most once.
            place = segment.source, segment.runs
            uses[place] += 1
            turn = deltas.setdefault(segment.delta + turned, len(deltas))
            piece = whole.setdefault((*place, uses[place]), _Piece(segment.source, segment.runs, []))
            piece.users.extend([(token, turn, segment.length) for token in places])
        seen = tail.length - count + 1
        tails.append(_Piece(BLOCKS, tail.runs, [(place, 0, seen + i) for i, place in enumerate(places)]))
    table, runs, users = _flat([*whole.values(), *tails])
    return AttentionPlan(torch.tensor(tokens), table, runs, users, torch.tensor(list(deltas)))


def divide(plan: AttentionPlan, most_keys: int, most_users: int, most_entries: int) -> Units:
    """Divides a plan into units of at most so many keys and users, and slices of about so many entries.

    Keys of a piece with no more users than that are in one unit each.
    """
    pieces, (token, turn, seen) = plan.pieces.numpy(), plan.users.numpy().T
    places, starts = places_of(plan.runs.numpy())
    num_parts = -(-seen // most_keys)
    bounds = np.cumsum(np.bincount(token + 1, num_parts)).astype(np.int64)
    slice_of = np.unique(bounds[:-1] // most_entries, return_inverse=True)[1]

    # A piece's users are in the order of their tokens: those in one slice follow one another.
    piece_of = np.repeat(np.arange(len(pieces)), pieces[:, 4] - pieces[:, 3])
    tile = _ranks(piece_of, slice_of[token]) // most_users
    user = np.repeat(np.arange(len(token)), num_parts)
    part = _ranks(user)
    order = np.lexsort((part, tile[user], piece_of[user], slice_of[token[user]]))
    user, part = user[order], part[order]
    first = np.flatnonzero(_changes(slice_of[token[user]], piece_of[user], tile[user], part))

    sees = np.minimum(seen[user] - part * most_keys, most_keys)
    entries = np.stack([plan.tokens.numpy()[token[user]], turn[user], sees], 1)
    source, first_run, *_ = pieces[piece_of[user[first]]].T
    first_place, num_places = starts[first_run] + part[first] * most_keys, np.maximum.reduceat(sees, first)
    units = np.stack([source, first_place, num_places, first, np.diff(first, append=len(user))], 1)

    first_token = np.searchsorted(slice_of, np.arange(slice_of[-1] + 2))
    first_entry = bounds[first_token]
    slices = np.stack([np.searchsorted(first, first_entry), first_entry, first_token], 1)
    by_token = np.argsort(token[user], kind="stable")
    return Units(*map(torch.from_numpy, (places, units, entries, by_token, bounds, slices)))


def places_of(runs: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The places of all runs' tokens (see :class:`Units`), and the number of each run's first one among them."""
    page, at, length = runs.T
    starts = np.cumsum(length) - length
    first = (page << PLACE_BITS) + at - starts
    return np.repeat(first, length) + np.arange(length.sum()), starts


def page_and_token(places: Tensor) -> tuple[Tensor, Tensor]:
    """Divide places (see :class:`Units`) into pages or blocks and the tokens' places in them, int64 each."""
    return places >> PLACE_BITS, places & (1 << PLACE_BITS) - 1


def _changes(*keys: NDArray[np.int64]) -> Any:
    """Whether an element differs from the one before."""
    return np.logical_or.reduce([np.diff(key, prepend=-1) != 0 for key in keys])


def _ranks(*keys: NDArray[np.int64]) -> Any:
    """Each element's number among the equal ones that follow one another."""
    numbers = np.arange(len(keys[0]))
    return numbers - np.maximum.accumulate(np.where(_changes(*keys), numbers, 0))


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
