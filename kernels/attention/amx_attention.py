# SPDX-License-Identifier: Apache-2.0
"""Chunk attention in bfloat16 on CPUs with AMX.

Few tokens are computed by :mod:`kernels.attention.numba_kernel`, which reads each key once for all that see it. Many of
one request take time for arithmetic, not for reading: their keys and values are gathered, each key turned to its place,
and PyTorch's own attention computes them in AMX's tiles.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kernels.attention.numba_attention import NumbaAttention
from kernels.attention.plan import (
    BLOCKS,
    POOL,
    PREFILL_TOKENS,
    AttendingRow,
    AttentionPlan,
    ChunkAttention,
    Segment,
    page_and_token,
    places_of,
    plan_step,
)
from kernels.layout import PagedTensor
from kernels.packed import is_packed
from kernels.paged import LayerKV
from kernels.rope import Rotations

TILE_TOKENS = 256
"""Tokens whose mask is in memory at once."""
_NEVER = 1 << 30


class AmxAttention(ChunkAttention):
    """Computes long prefills by PyTorch, all else as :class:`NumbaAttention`."""

    name = "PyTorch in AMX's tiles"
    needs = NumbaAttention.needs

    def __init__(self, layers: Sequence[LayerKV]) -> None:
        self._layers = layers
        self._short = NumbaAttention(layers)

    @staticmethod
    def supports(layers: Sequence[LayerKV]) -> bool:
        """Whether vLLM's blocks are in the layout of AMX, and the rest as :class:`NumbaAttention` needs it."""
        return NumbaAttention.supports(layers) and all(is_packed(kv.key_blocks, kv.value_blocks) for kv in layers)

    def plan(self, requests: Sequence[Sequence[AttendingRow]]) -> "AmxPlan":
        """Separates long prefills."""
        prefills, others = list[Prefill](), list[AttendingRow]()
        for rows in requests:
            if sum(row.num_tokens for row in rows) >= PREFILL_TOKENS:
                prefills.append(Prefill(rows))
            else:
                others += rows
        return AmxPlan(prefills, plan_step(others) if others else None)

    def attend(self, number: int, query: Tensor, output: Tensor, plan: "AmxPlan", scale: float) -> None:
        for prefill in plan.prefills:
            prefill.attend(self._layers[number], query, output, scale)
        if plan.others is not None:
            self._short.attend(number, query, output, plan.others, scale)


class AmxPlan(NamedTuple):
    """A step's long prefills, and its other tokens."""

    prefills: "list[Prefill]"
    others: AttentionPlan | None


class Prefill:
    """Many tokens of one request in a step, and the keys that they see, in the order in which its rows see them first.

    Queries and keys are turned to positions that all rows share.
    """

    def __init__(self, rows: Sequence[AttendingRow]) -> None:
        spans: dict[tuple[Segment, int], slice] = {}
        seen: list[tuple[int, slice, Tensor | int]] = []
        end, ends = 0, []
        for number, row in enumerate(rows):
            uses: Counter[Segment] = Counter()
            tail = Segment(row.tail.runs, row.tail.length, -row.turn, BLOCKS)
            for segment in (*row.segments, tail):
                use = segment, uses[segment]
                uses[segment] += 1
                if use not in spans:
                    spans[use] = slice(end, end + segment.length)
                    end += segment.length
                seen.append((number, spans[use], 0))
            seen.append((number, spans[use], torch.arange(row.num_tokens - tail.length, row.num_tokens)))
            ends.append(end)

        counts = torch.tensor([row.num_tokens for row in rows])
        self._tokens = torch.cat([torch.arange(row.first, row.first + row.num_tokens) for row in rows])
        self._rows = torch.arange(len(rows)).repeat_interleave(counts)
        self._numbers = torch.cat([torch.arange(row.num_tokens, dtype=torch.int32) for row in rows])
        self._queries = Rotations(torch.tensor([-row.turn for row in rows]).repeat_interleave(counts))
        self._ends = ends
        """Of each row, the end of the keys that it and the rows before see."""
        self._first_seen_by = torch.full((len(rows), end), _NEVER, dtype=torch.int32)
        """The first of a row's tokens that sees a key."""
        for number, span, first in seen:
            self._first_seen_by[number, span] = first

        segments = [segment for segment, _ in spans]
        lengths = torch.tensor([segment.length for segment in segments])
        self._keys = Rotations(torch.tensor([segment.delta for segment in segments]).repeat_interleave(lengths))
        sources = torch.tensor([segment.source for segment in segments]).repeat_interleave(lengths)
        places = torch.from_numpy(places_of(np.array([run for segment in segments for run in segment.runs]))[0])
        self._pool, self._blocks = (page_and_token(places[sources == source]) for source in (POOL, BLOCKS))
        self._order = sources.argsort(stable=True).argsort()

    def attend(self, layer: LayerKV, query: Tensor, output: Tensor, scale: float) -> None:
        """See :meth:`kernels.attention.plan.ChunkAttention.attend`."""
        keys = self._keys.apply(self._read(layer.key_pool, layer.key_blocks), layer.frequencies).transpose(0, 1)
        values = self._read(layer.value_pool, layer.value_blocks).transpose(0, 1)
        queries = self._queries.apply(query[self._tokens], layer.frequencies).transpose(0, 1)
        for first in range(0, len(self._tokens), TILE_TOKENS):
            tile = slice(first, first + TILE_TOKENS)
            rows = self._rows[tile]
            end = self._ends[rows[-1]]
            hidden = self._first_seen_by[rows, :end] > self._numbers[tile, None]
            mask = torch.zeros(hidden.shape, dtype=query.dtype).masked_fill_(hidden, -math.inf)
            attended = scaled_dot_product_attention(
                queries[None, :, tile], keys[None, :, :end], values[None, :, :end], mask, scale=scale, enable_gqa=True
            )
            output[self._tokens[tile]] = attended[0].transpose(0, 1)

    def _read(self, pool: Tensor, blocks: PagedTensor) -> Tensor:
        """K or V of the keys, ``[k, H, D]``."""
        return torch.cat([pool[self._pool], blocks[self._blocks]])[self._order]
