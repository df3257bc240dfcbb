# SPDX-License-Identifier: Apache-2.0
"""K and V in engines' layouts, all NaN with margins, so that stray writes show."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.layout import PagedTensor
from kernels.paged import LayerKV, make_pool
from kernels.reference import elements
from kernels.rope import RotaryFrequencies

VIEWS = ("key_blocks", "value_blocks", "key_pool", "value_pool")
_LAYERS_TOGETHER = 3


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of one layer's cache; values have another size than keys only in latent attention."""

    blocks: int
    block_size: int
    heads: int
    key_size: int
    value_size: int

    @property
    def numel(self) -> int:
        """Elements of K and V together."""
        return self.blocks * self.block_size * self.heads * (self.key_size + self.value_size)


KeyValue = tuple[Tensor, Tensor]
"""K and V as views `[blocks, block size, heads, size]`."""


def _2bnhd(flat: Tensor, s: Shape) -> KeyValue:
    cache = flat.view(2, s.blocks, s.block_size, s.heads, s.key_size)
    return cache[0], cache[1]


def _b2nhd(flat: Tensor, s: Shape) -> KeyValue:
    cache = flat.view(s.blocks, 2, s.block_size, s.heads, s.key_size)
    return cache[:, 0], cache[:, 1]


def _bhn2d(flat: Tensor, s: Shape) -> KeyValue:
    key, value = flat.view(s.blocks, s.heads, s.block_size, -1).transpose(1, 2).chunk(2, dim=-1)
    return key, value


def _bnh2d(flat: Tensor, s: Shape) -> KeyValue:
    key, value = flat.view(s.blocks, s.block_size, s.heads, -1).chunk(2, dim=-1)
    return key, value


def _b2hnd(flat: Tensor, s: Shape) -> KeyValue:
    cache = flat.view(s.blocks, 2, s.heads, s.block_size, s.key_size).transpose(2, 3)
    return cache[:, 0], cache[:, 1]


def _blnhc(flat: Tensor, s: Shape) -> KeyValue:
    """All layers of a block together; this is the second of three."""
    cache = flat.view(s.blocks, _LAYERS_TOGETHER, s.block_size, s.heads, -1)
    key, value = cache[:, 1].chunk(2, dim=-1)
    return key, value


def _mla(flat: Tensor, s: Shape) -> KeyValue:
    """The latent, which is V here, followed by the rotary part."""
    value, key = torch.split(flat.view(s.blocks, s.block_size, 1, -1), [s.value_size, s.key_size], dim=-1)
    return key, value


def _pair(flat: Tensor, s: Shape) -> KeyValue:
    """Ascend's: a tensor each."""
    tokens = s.blocks * s.block_size * s.heads
    key, value = torch.split(flat, [tokens * s.key_size, tokens * s.value_size])
    leading = (s.blocks, s.block_size, s.heads)
    return key.view(*leading, s.key_size), value.view(*leading, s.value_size)


LAYOUTS: dict[str, Callable[[Tensor, Shape], KeyValue]] = {
    "2BNHD": _2bnhd,
    "B2NHD": _b2nhd,
    "BHN2D": _bhn2d,
    "BNH2D": _bnh2d,
    "B2HND": _b2hnd,
    "BLNHC": _blnhc,
    "MLA": _mla,
    "pair": _pair,
    "pair MLA": _pair,
}


def is_latent(layout: str) -> bool:
    """Whether the layout is one of multi-head latent attention, which has one head."""
    return layout.endswith("MLA")


def make_blocks(
    layout: str, shape: Shape, dtype: torch.dtype, device: str, padding: int = 0
) -> tuple[Tensor, KeyValue]:
    """A layer's memory, all NaN, with ``padding`` elements at either end; its K and V."""
    numel = shape.numel * (_LAYERS_TOGETHER if layout == "BLNHC" else 1)
    whole = torch.full((padding + numel + padding,), math.nan, dtype=dtype, device=device)
    return whole, LAYOUTS[layout](whole[padding : padding + numel], shape)


def _on_cpu(layer: LayerKV) -> LayerKV:
    key_blocks, value_blocks, key_pool, value_pool = (elements(getattr(layer, name)).clone().cpu() for name in VIEWS)
    return LayerKV(PagedTensor(key_blocks), PagedTensor(value_blocks), key_pool, value_pool, layer.frequencies)


class Memory:
    """A layer for each of ``rotations``, all NaN, the margins of blocks and pool included."""

    def __init__(
        self,
        layout: str,
        shape: Shape,
        dtype: torch.dtype,
        device: str,
        padding: int,
        pages: int,
        page_tokens: int,
        rotations: Sequence[RotaryFrequencies],
    ) -> None:
        self._wholes: list[Tensor] = []
        self.layers: tuple[LayerKV, ...] = ()
        for each in rotations:
            whole, views = make_blocks(layout, shape, dtype, device, padding)
            keys, values = map(PagedTensor.of, views)
            pools = [make_pool(blocks, pages + 2, page_tokens).fill_(math.nan) for blocks in (keys, values)]
            self._wholes += [whole, *pools]
            key_pool, value_pool = (pool[1:-1] for pool in pools)
            self.layers += (LayerKV(keys, values, key_pool, value_pool, each),)

    def randomize(self, *names: str) -> None:
        """Fills these of ``VIEWS``, always with the same."""
        generator = torch.Generator().manual_seed(0)
        for layer in self.layers:
            for name in names:
                view = elements(getattr(layer, name))
                view.copy_(torch.randn(view.shape, generator=generator).to(view.dtype))

    def on_cpu(self) -> tuple[LayerKV, ...]:
        """The layers, copied."""
        return tuple(_on_cpu(layer) for layer in self.layers)

    def touched_margins(self) -> int:
        """Number of elements around K and V that are no longer NaN. Overwrites K and V with NaN."""
        for layer in self.layers:
            for name in VIEWS:
                elements(getattr(layer, name)).fill_(math.nan)
        return sum(int((~whole.isnan()).sum()) for whole in self._wholes)
