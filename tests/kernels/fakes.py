# SPDX-License-Identifier: Apache-2.0
"""Paged caches in engines' layouts, each with a matching writer."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.layout import PagedTensor

Views = Callable[[Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Shape:
    """Sizes of one paged cache."""

    blocks: int
    block_size: int
    heads: int
    dim: int
    value_dim: int = 0
    """For latent attention only; otherwise K's."""


@dataclass(frozen=True)
class FakeCache:
    """A cache tensor with the true views of K and V."""

    tensor: Tensor
    blocks: tuple[PagedTensor, PagedTensor]
    shape: Shape
    storage: Tensor
    """Storage that exceeds the tensor on both sides."""

    def write(self, key: Tensor, value: Tensor, slots: Tensor) -> None:
        """Store tokens one at a time, as the engine's writer would."""
        for token, slot in enumerate(slots.tolist()):
            block, offset = divmod(slot, self.shape.block_size)
            self.blocks[0][block, offset] = key[token]
            self.blocks[1][block, offset] = value[token]

    @property
    def key(self) -> Tensor:
        """K of a strided layout, `[blocks, block_size, heads, dim]`."""
        return self._strided(0)

    @property
    def value(self) -> Tensor:
        """V of a strided layout, likewise."""
        return self._strided(1)

    def _strided(self, operand: int) -> Tensor:
        view = self.blocks[operand].strided
        assert view is not None
        return view


def _cpu(cache: Tensor) -> tuple[Tensor, Tensor]:
    """K column-major in the first rows of a block, V row-major in the rest."""
    blocks, heads, size, _ = cache.shape
    key, value = cache.view(blocks, heads, 2 * size, -1).chunk(2, dim=2)
    dim = key.shape[-1]
    key = key.as_strided((blocks, heads, dim, size), (*key.stride()[:2], size, 1), key.storage_offset())
    return key.permute(0, 3, 1, 2), value.permute(0, 2, 1, 3)


def _heads_first(cache: Tensor) -> tuple[Tensor, Tensor]:
    key, value = cache.permute(0, 2, 1, 3).chunk(2, dim=-1)
    return key, value


LAYOUTS: dict[str, tuple[Callable[[Shape], tuple[int, ...]], Views]] = {
    "cpu": (lambda s: (s.blocks, s.heads, s.block_size, 2 * s.dim), _cpu),
    "2BNHD": (lambda s: (2, s.blocks, s.block_size, s.heads, s.dim), lambda c: (c[0], c[1])),
    "B2NHD": (lambda s: (s.blocks, 2, s.block_size, s.heads, s.dim), lambda c: (c[:, 0], c[:, 1])),
    "BHN2D": (lambda s: (s.blocks, s.heads, s.block_size, 2 * s.dim), _heads_first),
    "BNH2D": (
        lambda s: (s.blocks, s.block_size, s.heads, 2 * s.dim),
        lambda c: (c[..., : c.shape[-1] // 2], c[..., c.shape[-1] // 2 :]),
    ),
    # FlashInfer's, heads first.
    "B2HND": (
        lambda s: (s.blocks, 2, s.heads, s.block_size, s.dim),
        lambda c: (c[:, 0].transpose(1, 2), c[:, 1].transpose(1, 2)),
    ),
    # All layers of a block together; one layer of three.
    "BLNHC": (
        lambda s: (s.blocks, 3, s.block_size, s.heads, 2 * s.dim),
        lambda c: (c[:, 1, ..., : c.shape[-1] // 2], c[:, 1, ..., c.shape[-1] // 2 :]),
    ),
}

AMX = "AMX"
"""vLLM's bfloat16 on CPUs with AMX: in words of two, K's dimensions and V's tokens; blocks are multiples of 32."""

MLA = "MLA"
"""Multi-head latent attention: the latent (V here), followed by the part that RoPE rotates."""

PAIR = "pair"
"""Ascend: separate tensors for K and V, of different widths for latent attention."""


def make_cache(layout: str, shape: Shape, dtype: torch.dtype = torch.float32, fill: float = float("nan")) -> FakeCache:
    """Return a filled cache that starts four elements into its storage."""
    size, views = _SIZED[layout](shape) if layout in _SIZED else (LAYOUTS[layout][0](shape), LAYOUTS[layout][1])
    numbers = torch.Size(size).numel()
    storage = torch.full((4 + numbers + 4,), fill, dtype=dtype)
    cache = storage[4 : 4 + numbers].view(size)
    key, value = views(cache)
    return FakeCache(cache, (_blocks(key), _blocks(value)), shape, storage)


def _blocks(view: Tensor) -> PagedTensor:
    """Tiles have six dimensions, everything else four."""
    return PagedTensor(view) if view.dim() == 6 else PagedTensor.of(view)


def _mla(shape: Shape) -> tuple[tuple[int, ...], Views]:
    size = (shape.blocks, shape.block_size, shape.value_dim + shape.dim)
    return size, lambda c: (c[:, :, None, shape.value_dim :], c[:, :, None, : shape.value_dim])


def _pair(shape: Shape) -> tuple[tuple[int, ...], Views]:
    sizes = [(shape.blocks, shape.block_size, shape.heads, dim) for dim in (shape.dim, shape.value_dim or shape.dim)]
    numbers = [torch.Size(size).numel() for size in sizes]

    def views(cache: Tensor) -> tuple[Tensor, Tensor]:
        key, value = (part.view(size) for part, size in zip(cache.split(numbers), sizes, strict=True))
        return key, value

    return (sum(numbers),), views


def _amx(shape: Shape) -> tuple[tuple[int, ...], Views]:
    blocks, size, heads, dim = shape.blocks, shape.block_size, shape.heads, shape.dim

    def views(cache: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = cache.chunk(2, dim=2)
        outer = cache.stride()[:2]
        keys = keys.as_strided(
            (blocks, size // 16, 16, heads, dim // 2, 2),
            (outer[0], 16 * dim, 2, outer[1], 32, 1),
            keys.storage_offset(),
        )
        values = values.as_strided(
            (blocks, size // 2, 2, heads, dim // 16, 16),
            (outer[0], 32, 1, outer[1], 16 * size, 2),
            values.storage_offset(),
        )
        return keys, values

    return (blocks, heads, 2 * size, dim), views


_SIZED = {MLA: _mla, PAIR: _pair, AMX: _amx}
