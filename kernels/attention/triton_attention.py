# SPDX-License-Identifier: Apache-2.0
"""Chunk attention on a GPU, by :mod:`kernels.attention.triton_kernel`: two launches for each layer."""

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from kernels.attention.plan import PLACE_BITS, AttentionPlan, ChunkAttention, Units, divide
from kernels.attention.triton_kernel import attend_units, merge_units
from kernels.paged import LayerKV, send, strided_blocks
from kernels.rope import RotaryFrequencies

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MOST_HEAD_SIZE = 256

_MOST_KEYS = 512
"""Keys of one unit: a context of 16K tokens and 8 KV heads are 256 programs."""
_MOST_ENTRIES = 4096
"""Entries whose results are kept at once, of 16 KiB each with 32 heads of 128."""
MERGED_ENTRIES = 16
PRECISION = "ieee"
"""Of products of float32, which would be rounded to 10 bits otherwise."""
_ALIGNMENT = 16
"""Elements of a vector of the widest loads."""


class Tiles(NamedTuple):
    """Sizes that a launch is compiled for: rows and keys of a tile, warps, and stages of its loads."""

    rows: int
    keys: int
    warps: int
    stages: int


_WIDEST_NARROW = 128
"""Longer heads have fewer rows; float32, which no tensor core multiplies, has the least."""
_NARROW = Tiles(16, 64, 4, 3), Tiles(64, 64, 8, 2), Tiles(128, 64, 8, 2)
_WIDE = Tiles(16, 64, 4, 2), Tiles(64, 64, 8, 2)
_NARROW_FLOAT32 = (Tiles(16, 16, 4, 2),)
_WIDE_FLOAT32 = (Tiles(16, 16, 8, 1),)


def tiles_of(dtype: torch.dtype, head_size: int) -> tuple[Tiles, ...]:
    """The tiles that fit into a GPU's registers, from few rows to many, each a query head of one token."""
    if head_size <= _WIDEST_NARROW:
        return _NARROW_FLOAT32 if dtype == torch.float32 else _NARROW
    return _WIDE_FLOAT32 if dtype == torch.float32 else _WIDE


class TritonAttention(ChunkAttention):
    """Works on the current stream, without waiting for it."""

    name = "Triton"
    needs = f"float32, float16 or bfloat16 in strided blocks, with heads of at most {MOST_HEAD_SIZE} dimensions"

    def __init__(self, layers: Sequence[LayerKV]) -> None:
        self._layers = [_Layer.of(layer) for layer in layers]
        self._steps: dict[tuple[int, int], _Step] = {}
        self._plan: AttentionPlan | None = None

    @staticmethod
    def supports(layers: Sequence[LayerKV]) -> bool:
        """Whether K and V are alike, of a dtype that the kernel multiplies, in blocks without tiles."""
        return all(map(_is_supported, layers))

    def attend(self, number: int, query: Tensor, output: Tensor, plan: AttentionPlan, scale: float) -> None:
        layer, (_, num_heads, size) = self._layers[number], query.shape
        step = self._step(plan, layer, num_heads // layer.num_heads)
        cos, sin = step.angles(layer.frequencies)
        parts, sums = (query.new_empty(step.most_entries, num_heads, width, dtype=torch.float32) for width in (size, 1))
        sizes = {"HEAD_SIZE": size, "WIDTH": triton.next_power_of_2(size)}
        for (unit, entry, token), (end_unit, _, end_token) in pairwise(step.slices):
            attend_units[((end_unit - unit) * layer.num_heads,)](
                query,
                layer.keys,
                layer.values,
                layer.strides,
                *step.units[:3],
                cos,
                sin,
                parts,
                sums,
                scale * math.log2(math.e),
                *query.stride()[:2],
                layer.num_heads,
                unit,
                entry,
                **sizes,
                PAIRS=cos.shape[1],
                IS_NEOX=layer.frequencies.is_neox,
                GROUP=num_heads // layer.num_heads,
                ROWS=step.tiles.rows,
                KEYS=step.tiles.keys,
                PLACE_BITS=PLACE_BITS,
                ALIGNED=_ALIGNMENT if layer.is_aligned else 1,
                ADJACENT=layer.is_adjacent,
                PRECISION=PRECISION,
                num_warps=step.tiles.warps,
                num_stages=step.tiles.stages,
            )
            merge_units[((end_token - token) * num_heads,)](
                output,
                parts,
                sums,
                step.tokens,
                *step.units[3:5],
                *output.stride()[:2],
                num_heads,
                token,
                entry,
                **sizes,
                ENTRIES=MERGED_ENTRIES,
            )

    def _step(self, plan: AttentionPlan, layer: "_Layer", group: int) -> "_Step":
        """The plan's units, made once a step for all layers of one form."""
        if plan is not self._plan:
            self._plan, self._steps = plan, {}
        key = group, layer.keys.shape[3]
        if key not in self._steps:
            self._steps[key] = _Step(plan, layer, group)
        return self._steps[key]


class _Step:
    """A plan's units on the device, for layers like ``layer`` with ``group`` query heads for each KV head."""

    def __init__(self, plan: AttentionPlan, layer: "_Layer", group: int) -> None:
        most_users = int((plan.pieces[:, 4] - plan.pieces[:, 3]).max())
        tiles = tiles_of(layer.keys.dtype, layer.keys.shape[3])
        fitting = next((each for each in tiles if each.rows >= most_users * group), tiles[-1])
        self.tiles = fitting._replace(rows=max(fitting.rows, triton.next_power_of_2(group)))
        units = divide(plan, _MOST_KEYS, self.tiles.rows // group, _MOST_ENTRIES)
        self.slices: list[list[int]] = units.slices.tolist()
        self.most_entries = int(units.slices[:, 1].diff().max())
        self._device = layer.keys.device
        self.units = Units(*_sent(units, self._device))
        self.tokens = send(plan.tokens, self._device)
        self._plan = plan
        self._angles: dict[int, Tensor] = {}

    def angles(self, frequencies: RotaryFrequencies) -> Tensor:
        """cos and sin, float32 ``[2, deltas, pairs]``."""
        key = id(frequencies)
        if key not in self._angles:
            self._angles[key] = send(torch.stack(self._plan.angles.of(frequencies)), self._device)
        return self._angles[key]


def _sent(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Int64 tensors on the device, by one copy."""
    together = send(torch.cat([tensor.flatten() for tensor in tensors]), device)
    ends = accumulate(tensor.numel() for tensor in tensors)
    return [together[end - tensor.numel() : end].view(tensor.shape) for end, tensor in zip(ends, tensors, strict=True)]


class _Layer(NamedTuple):
    """A layer as the kernel takes it: the pool, and where blocks lie from there."""

    keys: Tensor
    values: Tensor
    strides: Tensor
    num_heads: int
    frequencies: RotaryFrequencies
    is_aligned: bool
    is_adjacent: bool

    @classmethod
    def of(cls, layer: LayerKV) -> "_Layer":
        pools = layer.key_pool, layer.value_pool
        strides = torch.tensor(
            [
                [_distance(view, pool), *view.stride()]
                for views in (pools, strided_blocks(layer))
                for view, pool in zip(views, pools, strict=True)
            ]
        )
        is_aligned = not bool((strides[:, :4] % _ALIGNMENT).any())
        is_adjacent = bool((strides[:, 4] == 1).all())
        return cls(*pools, strides.to(pools[0].device), pools[0].shape[2], layer.frequencies, is_aligned, is_adjacent)


def _distance(view: Tensor, other: Tensor) -> int:
    """Elements from the first of ``other`` to the first of ``view``."""
    return (view.data_ptr() - other.data_ptr()) // view.element_size()


def _is_supported(layer: LayerKV) -> bool:
    views = (layer.key_blocks, layer.key_pool, layer.value_blocks, layer.value_pool)
    (dtype, (_, size)), *others = {(view.dtype, tuple(view.shape[2:])) for view in views}
    is_strided = layer.key_blocks.strided is not None and layer.value_blocks.strided is not None
    return not others and dtype in DTYPES and size <= MOST_HEAD_SIZE and is_strided
