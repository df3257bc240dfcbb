# SPDX-License-Identifier: Apache-2.0
"""From segments to a layout: where each segment starts, where it appears, and by how much its keys turn.

RoPE attention depends only on differences of positions. The engine places the question at its index in the
sequence, ``N``; so instead of moving the question, every cached key is rotated to where it must appear
relative to it:

=============  ============  ==================  =====================  ==================  ===================
segment        computed at   shared: position    shared: rotate by      offset: position    offset: rotate by
=============  ============  ==================  =====================  ==================  ===================
system         0             0                   D                      0                   0
chunk i        P             S                   D + S - P              o_i                 o_i - P
question       N             S + max(L)          0 (stays at N)         N                   0
=============  ============  ==================  =====================  ==================  ===================

``S`` is the length of the system segment, ``P`` that of what the chunks are computed behind (the system segment, or
the constant opening in scope ``isolated``), ``L`` a chunk's length, ``o_i`` the index of chunk i's first token,
``D = N - (S + max(L))``.

*In place*, nothing is rotated with shared positions: the question is computed ``D`` positions before its index instead,
and chunks are where they were computed. Only differences count, so it is the same. The engine's blocks of a chunk are
then the same for all requests.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import Any

TokenIds = tuple[int, ...]
PackedTokens = bytes
"""Token ids as 32-bit integers in the machine's order: quick to hash and to compare."""


def pack(token_ids: TokenIds) -> PackedTokens:
    """The ids' bytes; raises ``struct.error`` for ids of more than 31 bits."""
    return struct.pack(f"{len(token_ids)}i", *token_ids)


def unpack(packed: PackedTokens) -> TokenIds:
    """The ids that :func:`pack` was given."""
    return struct.unpack(f"{packed_length(packed)}i", packed)


def packed_length(packed: PackedTokens) -> int:
    """Number of packed ids."""
    return len(packed) // struct.calcsize("i")


def take(packed: PackedTokens, start: int, length: int) -> PackedTokens:
    """``length`` of the packed ids, from index ``start`` on."""
    size = struct.calcsize("i")
    return packed[start * size : (start + length) * size]


def split_packed(packed: PackedTokens, num_tokens: int) -> list[PackedTokens]:
    """``packed`` in pieces of ``num_tokens``, the last one of what is left."""
    size = num_tokens * struct.calcsize("i")
    return [packed[start : start + size] for start in range(0, len(packed), size)]


class PositionStrategy(StrEnum):
    """How chunks are placed relative to each other."""

    SHARED = "shared"
    OFFSET = "offset"


@dataclass(frozen=True)
class Chunk:
    """One document chunk of a request, or one part of a document that is longer than a chunk may be."""

    packed: PackedTokens
    id: str | None = None
    """The document's, as its sender named it."""
    document: int = 0
    """Index of the document among those of the request."""
    part: tuple[int, int] | None = None
    """``(2, 3)`` for the second of three parts."""

    @property
    def token_ids(self) -> TokenIds:
        """The chunk's tokens."""
        return unpack(self.packed)

    @property
    def num_tokens(self) -> int:
        """Length of the chunk."""
        return packed_length(self.packed)

    @property
    def label(self) -> dict[str, Any]:
        """Which chunk this is, in JSON: ``index`` and ``id`` of its document, ``part`` if it is one of several."""
        part = {"part": {"number": self.part[0], "of": self.part[1]}} if self.part else {}
        return {"index": self.document, "id": self.id, **part}


@dataclass(frozen=True)
class ChunkedPrompt:
    """A prompt as segments, each tokenized on its own. ``system`` may be empty, chunks and question not.

    ``opening`` is what chunks are computed behind, if that is not the system segment (scope ``isolated``).
    """

    system: TokenIds
    chunks: tuple[Chunk, ...]
    question: TokenIds
    opening: TokenIds | None = None

    def __post_init__(self) -> None:
        if not self.question:
            raise ValueError("the question segment has no tokens; the engine must compute at least one")
        if any(not chunk.packed for chunk in self.chunks):
            raise ValueError("a chunk has no tokens")

    @cached_property
    def token_ids(self) -> list[int]:
        """All tokens in the order in which the engine sees them."""
        return [*self.system, *unpack(b"".join(chunk.packed for chunk in self.chunks)), *self.question]

    @property
    def chunk_prefix(self) -> TokenIds:
        """The tokens that each chunk's KV is computed behind."""
        return self.system if self.opening is None else self.opening

    @property
    def num_context_tokens(self) -> int:
        """Tokens before the question, ``N``."""
        return len(self.token_ids) - len(self.question)


@dataclass(frozen=True, slots=True)
class Placement:
    """One segment in a layout.

    Tokens ``[start, start + length)`` of the sequence; its first token is logically at ``position``; its cached
    keys are rotated by ``delta`` positions before the engine sees them.
    """

    start: int
    length: int
    position: int
    delta: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Placements of all segments of one prompt under one position strategy."""

    strategy: PositionStrategy
    system: Placement
    chunks: tuple[Placement, ...]
    question: Placement
    shift: int | None = None
    """In place: how many positions before its index the question is computed."""

    def salt_parts(self) -> list[int | str]:
        """What, beside the tokens themselves, decides the composed KV of this layout."""
        place: list[int | str] = [] if self.shift is None else ["in place", self.shift]
        return [self.strategy.value, *place, self.system.length, *(chunk.length for chunk in self.chunks)]

    def in_place(self) -> "Layout":
        """The same distances, with the question moved instead of the keys by as much as the system segment's turn."""
        shift = self.system.delta
        system, *chunks = (replace(at, delta=at.delta - shift) for at in (self.system, *self.chunks))
        return replace(self, system=system, chunks=tuple(chunks), shift=shift)


class PositionReindexer:
    """Computes layouts; a pure function of segment lengths and the strategy.

    ``block_tokens``: segments that fill whole blocks of so many tokens are placed in place, where they can be.
    """

    def __init__(self, block_tokens: int | None = None) -> None:
        self._block_tokens = block_tokens

    def layout(self, prompt: ChunkedPrompt, strategy: PositionStrategy) -> Layout:
        """The layout of ``prompt``; raises ``ValueError`` for a prompt without chunks."""
        lengths = [chunk.num_tokens for chunk in prompt.chunks]
        if not lengths:
            raise ValueError("a prompt without chunks has no chunk layout")
        if strategy is PositionStrategy.OFFSET:
            return self._offset(len(prompt.system), len(prompt.chunk_prefix), lengths, len(prompt.question))
        layout = self._shared(len(prompt.system), len(prompt.chunk_prefix), lengths, len(prompt.question))
        return layout.in_place() if self._fits_in_place(prompt, lengths) else layout

    def _fits_in_place(self, prompt: ChunkedPrompt, lengths: Sequence[int]) -> bool:
        """Whether chunks are where they were computed once the question moves, and blocks have one segment each."""
        size = self._block_tokens
        if size is None or prompt.opening is not None:
            return False
        return all(length % size == 0 for length in (len(prompt.system), *lengths))

    @staticmethod
    def _shared(system: int, prefix: int, lengths: Sequence[int], question: int) -> Layout:
        starts = _starts(system, lengths)
        num_context, longest_end = starts[-1], system + max(lengths)
        delta = num_context - longest_end
        moved = delta + system - prefix
        return Layout(
            PositionStrategy.SHARED,
            Placement(0, system, 0, delta),
            tuple(Placement(start, n, system, moved) for start, n in zip(starts, lengths, strict=False)),
            Placement(num_context, question, longest_end, 0),
        )

    @staticmethod
    def _offset(system: int, prefix: int, lengths: Sequence[int], question: int) -> Layout:
        starts = _starts(system, lengths)
        return Layout(
            PositionStrategy.OFFSET,
            Placement(0, system, 0, 0),
            tuple(Placement(start, n, start, start - prefix) for start, n in zip(starts, lengths, strict=False)),
            Placement(starts[-1], question, starts[-1], 0),
        )


def _starts(system: int, lengths: Sequence[int]) -> list[int]:
    """Index of each chunk's first token, then that of the question's."""
    starts = [system]
    for length in lengths:
        starts.append(starts[-1] + length)
    return starts
