# SPDX-License-Identifier: Apache-2.0
"""From segments to a layout: start, logical position and key rotation of each segment.

RoPE attention depends only on differences of positions. The engine places the question at its index in the
sequence, ``N``, so every cached key is rotated to its position relative to the question:

==================  ==========  ========  =======  ===================
..                  shared      parallel  offset   window
==================  ==========  ========  =======  ===================
system starts at    0           0         0        max(0, N - W - S)
chunk i starts at   S           S         o_i      max(o_i, N - W)
question starts at  S + max(L)  N         N        N
system turns by     D           0         0        its start
chunk i turns by    D + S - P_i S - P_i   o_i - P_i its start - P_i
==================  ==========  ========  =======  ===================

``S`` is the length of the system segment, ``P_i`` the length of the tokens before chunk i where it was computed (the
system segment, or the constant opening in scope ``isolated``, and the chunk's context), ``L`` a chunk's length, ``o_i``
the index of chunk i's first token, ``D = N - (S + max(L))``, ``W`` the larger of the window and ``max(L)``: no chunk
starts farther from the question, so that chunks together may exceed the positions that a model was trained for. That is
ReRoPE (https://kexue.fm/archives/9708) at the grain of a chunk.

*In place*, requests share the engine's own blocks of a chunk, so its keys keep the positions at which they were
computed: those that ``parallel`` positions need. With placement ``attend``, keys stay in the pool as computed, and
attention turns the question's queries by minus as many positions instead.
"""

import struct
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal

from cache.errors import EmptySegmentError

TokenIds = tuple[int, ...]
PlacementName = Literal["copy", "in-place", "attend"]
"""How a request gets its chunks: copies, the engine's shared blocks, or attention over the pool."""
PackedTokens = bytes
"""Token ids as 32-bit integers in the machine's byte order: quick to hash and to compare."""


def pack(token_ids: TokenIds) -> PackedTokens:
    """The ids' bytes; raises ``struct.error`` for ids of more than 31 bits."""
    return struct.pack(f"{len(token_ids)}i", *token_ids)


def unpack(packed: PackedTokens) -> TokenIds:
    """The inverse of :func:`pack`."""
    return struct.unpack(f"{packed_length(packed)}i", packed)


def packed_length(packed: PackedTokens) -> int:
    """Number of packed ids."""
    return len(packed) // struct.calcsize("i")


def take(packed: PackedTokens, start: int, length: int) -> PackedTokens:
    """``length`` of the packed ids, from index ``start`` on."""
    size = struct.calcsize("i")
    return packed[start * size : (start + length) * size]


def split_packed(packed: PackedTokens, num_tokens: int) -> list[PackedTokens]:
    """``packed`` in pieces of ``num_tokens``; the last one may be shorter."""
    size = num_tokens * struct.calcsize("i")
    return [packed[start : start + size] for start in range(0, len(packed), size)]


def num_in_common(one: PackedTokens, other: PackedTokens) -> int:
    """How many of the first ids are the same."""
    most = min(packed_length(one), packed_length(other))
    return bisect_left(range(1, most + 1), True, key=lambda length: take(one, 0, length) != take(other, 0, length))


class PositionStrategy(StrEnum):
    """Place of chunks relative to each other."""

    SHARED = "shared"
    """Chunks overlap; the question follows the longest of them."""
    PARALLEL = "parallel"
    """Chunks overlap; the question stays at its index."""
    OFFSET = "offset"
    """Chunks follow one another, as in the prompt."""
    WINDOW = "window"
    """Like ``offset``, but chunks farther from the question than a window start at its edge."""


@dataclass(frozen=True)
class Chunk:
    """One document chunk of a request, or one part of a long document.

    A chunk may be used in part: its key, and the KV in the pool, are those of all its tokens.
    """

    packed: PackedTokens
    id: str | None = None
    """The client's id of the document."""
    document: int = 0
    """Index of the document in the request."""
    part: tuple[int, int] | None = None
    """``(2, 3)`` for the second of three parts."""
    context: PackedTokens = b""
    """Tokens that it is computed behind, and that are no part of the prompt: what precedes it in its document."""
    num_used: int | None = None
    """How many of its tokens, from the first on, the prompt has; ``None``: all. KV never depends on later tokens."""
    is_text: bool = False
    """Whether it is no document, but the prompt's text between two."""

    @property
    def packed_in_prompt(self) -> PackedTokens:
        """Those of its tokens that the prompt has."""
        return self.packed if self.num_used is None else take(self.packed, 0, self.num_used)

    @property
    def token_ids(self) -> TokenIds:
        """The chunk's tokens in the prompt."""
        return unpack(self.packed_in_prompt)

    @property
    def num_tokens(self) -> int:
        """Length of the chunk in the prompt."""
        return packed_length(self.packed) if self.num_used is None else self.num_used

    @property
    def num_with_context(self) -> int:
        """Tokens that are computed where nothing of the chunk is cached, but for the prompt's before it."""
        return self.num_tokens + packed_length(self.context)

    @property
    def label(self) -> dict[str, Any]:
        """JSON of the chunk: ``index`` and ``id`` of its document, ``part`` of several."""
        part = {"part": {"number": self.part[0], "of": self.part[1]}} if self.part else {}
        return {"index": self.document, "id": self.id, **part}


@dataclass(frozen=True)
class ChunkedPrompt:
    """A prompt as segments, each tokenized on its own. ``system`` may be empty, chunks and question not.

    ``opening`` has the tokens before each chunk where it is computed, if not the system segment (scope ``isolated``).
    ``blank`` is a question without content that could stand in the question's place, if one is known.
    """

    system: TokenIds
    chunks: tuple[Chunk, ...]
    question: TokenIds
    opening: TokenIds | None = None
    blank: TokenIds = ()

    def __post_init__(self) -> None:
        if not self.question:
            raise EmptySegmentError("the question segment has no tokens; the engine must compute at least one")
        if any(not chunk.num_tokens for chunk in self.chunks):
            raise EmptySegmentError("a chunk has no tokens")

    def num_before(self, chunk: Chunk) -> int:
        """Number of tokens before ``chunk`` where its KV is computed."""
        return len(self.chunk_prefix) + packed_length(chunk.context)

    @property
    def num_context_of_chunks(self) -> int:
        """Tokens of the chunks' contexts, which are no part of the prompt."""
        return sum(packed_length(chunk.context) for chunk in self.chunks)

    def keeping(self, kept: Sequence[int]) -> "ChunkedPrompt":
        """The prompt with these chunks only, by index."""
        return replace(self, chunks=tuple(self.chunks[index] for index in kept))

    @cached_property
    def token_ids(self) -> list[int]:
        """All tokens in the order in which the engine sees them."""
        return [*self.system, *unpack(b"".join(chunk.packed_in_prompt for chunk in self.chunks)), *self.question]

    @property
    def documents(self) -> list[int]:
        """Indices of the chunks that are (parts of) documents."""
        return [index for index, chunk in enumerate(self.chunks) if not chunk.is_text]

    @property
    def chunk_prefix(self) -> TokenIds:
        """The tokens before each chunk and its context where its KV is computed."""
        return self.system if self.opening is None else self.opening

    @property
    def num_context_tokens(self) -> int:
        """Tokens before the question, ``N``."""
        return len(self.token_ids) - len(self.question)


@dataclass(frozen=True, slots=True)
class Place:
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
    """Places of all segments of one prompt under one position strategy."""

    strategy: PositionStrategy
    system: Place
    chunks: tuple[Place, ...]
    question: Place
    placement: PlacementName = "copy"
    num_left_out: int = 0
    """Tokens of chunks that a budget has left out."""
    is_requantized: bool = False
    """Whether quantized keys are turned, and so rounded once more."""

    def keeping(self, kept: Sequence[int]) -> "Layout":
        """The layout of the sequence with these chunks only, by index; all positions stay.

        The question's index is smaller then, so every key turns by as many positions less. Blocks of chunks in place
        can't turn, so they are copied.
        """
        chunks = [self.chunks[index] for index in kept]
        starts = list(accumulate((chunk.length for chunk in chunks), initial=self.system.length))
        left_out = self.question.start - starts[-1]
        if left_out == 0:
            return self
        return replace(
            self,
            system=replace(self.system, delta=self.system.delta - left_out),
            chunks=tuple(
                replace(chunk, start=start, delta=chunk.delta - left_out)
                for chunk, start in zip(chunks, starts, strict=False)
            ),
            question=replace(self.question, start=starts[-1]),
            placement="copy" if self.placement == "in-place" else self.placement,
            num_left_out=self.num_left_out + left_out,
        )

    @property
    def turns(self) -> bool:
        """Whether keys leave the positions at which they were computed."""
        return any(segment.delta for segment in (self.system, *self.chunks))

    @property
    def reach(self) -> int:
        """Positions from the first token of the context to the end of the question."""
        first = min(each.position for each in (self.system, *self.chunks) if each.length)
        return self.question.position + self.question.length - first

    def salt_parts(self) -> list[int | str]:
        """Everything but the tokens that determines the composed KV of this layout."""
        place: list[int | str] = [] if self.placement == "copy" else [self.placement]
        if self.strategy is PositionStrategy.WINDOW or self.num_left_out:
            place += [each.position for each in (self.system, *self.chunks, self.question)]
        return [self.strategy.value, *place, self.system.length, *(chunk.length for chunk in self.chunks)]


def layout_as_computed(prompt: ChunkedPrompt) -> Layout:
    """The place of each segment where its KV is computed: each chunk directly behind its prefix."""
    prefixes = map(prompt.num_before, prompt.chunks)
    return Layout(
        PositionStrategy.SHARED,
        Place(0, len(prompt.system), 0, 0),
        tuple(Place(at, chunk.num_tokens, at, 0) for at, chunk in zip(prefixes, prompt.chunks, strict=True)),
        Place(prompt.num_context_tokens, len(prompt.question), prompt.num_context_tokens, 0),
    )


@dataclass(frozen=True, slots=True)
class PositionReindexer:
    """Computes layouts; a pure function of segment lengths and the strategy.

    ``placement`` is the server's; in place, only segments that fill whole blocks of ``block_tokens`` at the positions
    at which they were computed are shared, others copied. ``window`` is that of the strategy of this name, in tokens.
    ``is_quantized``: the engine's KV cache is.
    """

    placement: PlacementName = "copy"
    block_tokens: int = 1
    window: int = 1 << 30
    is_quantized: bool = False

    def layout(self, prompt: ChunkedPrompt, strategy: PositionStrategy) -> Layout:
        """The layout of ``prompt``; raises ``ValueError`` for a prompt without chunks."""
        lengths = [chunk.num_tokens for chunk in prompt.chunks]
        if not lengths:
            raise ValueError("a prompt without chunks has no chunk layout")
        prefixes = list(map(prompt.num_before, prompt.chunks))
        layout = _layout(strategy, lengths, prefixes, len(prompt.system), len(prompt.question), self.window)
        copies = self.placement == "in-place" and not self._fits_blocks(prompt, layout)
        placement: PlacementName = "copy" if copies else self.placement
        return replace(layout, placement=placement, is_requantized=self.is_quantized and layout.turns)

    def _fits_blocks(self, prompt: ChunkedPrompt, layout: Layout) -> bool:
        """Whether chunks keep their computed positions, and no block has two segments."""
        whole = all(segment.length % self.block_tokens == 0 for segment in (layout.system, *layout.chunks))
        has_context = any(chunk.context for chunk in prompt.chunks)
        return prompt.opening is None and not has_context and whole and not layout.turns


def _layout(
    strategy: PositionStrategy,
    lengths: Sequence[int],
    prefixes: Sequence[int],
    system: int,
    question: int,
    window: int,
) -> Layout:
    *starts, num_context = accumulate(lengths, initial=system)
    question_at, system_at = num_context, 0
    match strategy:
        case PositionStrategy.OFFSET:
            positions = starts
        case PositionStrategy.WINDOW:
            edge = num_context - max(window, *lengths)
            system_at = max(0, edge - system)
            positions = [max(start, edge) for start in starts]
        case PositionStrategy.PARALLEL:
            positions = [system] * len(lengths)
        case PositionStrategy.SHARED:
            positions, question_at = [system] * len(lengths), system + max(lengths)
    turn = num_context - question_at
    chunks = zip(starts, lengths, positions, prefixes, strict=True)
    return Layout(
        strategy,
        Place(0, system, system_at, system_at + turn),
        tuple(Place(start, length, at, at + turn - prefix) for start, length, at, prefix in chunks),
        Place(num_context, question, question_at, 0),
    )
