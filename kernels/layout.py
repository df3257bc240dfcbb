# SPDX-License-Identifier: Apache-2.0
"""Layout of K and V inside the engine's paged KV cache tensor.

The layout is found by probing: the engine's own cache writer stores known values in two spare blocks, and the addresses
are read off the elements that changed. No engine version's layout is hard-coded, so a new one either works or raises an
error.

What can be described is *separable*: an element's address is a sum of a part for its block, one for its token within
the block, one for its head and one for its dimension. The parts for tokens and dimensions may come in tiles, as on CPUs
with AMX, where vLLM keeps bfloat16 K with dimensions in pairs and tokens in tiles of 16, and V the other way round.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

CacheWriter = Callable[[Tensor, Tensor, Tensor], None]
"""The engine's writer: (key [T, H, Dk], value [T, H, Dv], slots int64 [T])."""

_PROBED_BLOCKS = 2
_ADVICE = "use an attention backend whose cache layout is separable in block, token, head and dimension"


class LayoutProbeError(RuntimeError):
    """The cache layout cannot be described by strides.

    The message has the failure, the numbers found and advice to the caller.
    """

    def __init__(self, cause: str, seen: str, advice: str) -> None:
        super().__init__(f"{cause}; seen: {seen}; {advice}")
        self.cause = cause
        self.seen = seen
        self.advice = advice


@dataclass(frozen=True)
class Axis:
    """Addresses along tokens or dimensions, in elements: index `i` is at `i // tile * stride + i % tile * step`.

    An affine axis is a single tile. A stride or step that no second index uses carries no information and is 1.
    """

    size: int
    tile: int
    step: int
    stride: int


@dataclass(frozen=True)
class PagedTensor:
    """K or V in the engine's blocks, a tensor `[blocks, block_size, H, D]` in any separable layout.

    `tiles` is a view `[blocks, token tiles, tokens in each, H, dim tiles, dims in each]` of the engine's memory. Index
    it by blocks, or by blocks and tokens in them (integers, or int64 tensors of one shape); what is read is a copy.
    """

    tiles: Tensor

    @classmethod
    def of(cls, view: Tensor) -> Self:
        """Wrap a strided view `[blocks, block_size, H, D]`."""
        return cls(view[:, None, :, :, None])

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Return `(blocks, block_size, H, D)`."""
        blocks, token_tiles, tokens, heads, dim_tiles, dims = self.tiles.shape
        return blocks, token_tiles * tokens, heads, dim_tiles * dims

    @property
    def dtype(self) -> torch.dtype:
        return self.tiles.dtype

    @property
    def device(self) -> torch.device:
        return self.tiles.device

    @property
    def strided(self) -> Tensor | None:
        """Return the view `[blocks, block_size, H, D]`, or None if an axis has tiles."""
        is_strided = self.tiles.shape[1] == self.tiles.shape[4] == 1
        return self.tiles[:, 0, :, :, 0] if is_strided else None

    def describe(self) -> str:
        """Describe the layout for people."""
        if (strided := self.strided) is not None:
            return f"strides {strided.stride()}"
        return f"tiles of {self.tiles.shape[2]} tokens and {self.tiles.shape[5]} dimensions"

    def __getitem__(self, index: Any) -> Tensor:
        if isinstance(index, tuple):
            return self.tiles[self._place(*index)].flatten(-2)
        return self.tiles[index].flatten(-2).flatten(-4, -3)

    def __setitem__(self, index: tuple[Any, Any], tokens: Tensor) -> None:
        self.tiles[self._place(*index)] = tokens.reshape(*tokens.shape[:-1], *self.tiles.shape[4:])

    def _place(self, blocks: Any, tokens: Any) -> tuple[Any, Any, Any]:
        tile = self.tiles.shape[2]
        return blocks, tokens // tile, tokens % tile


@dataclass(frozen=True)
class OperandLayout:
    """Addresses of one operand (K or V), in elements of the cache storage.

    `offset` counts from the cache tensor's own first element. The stride of a single block or head carries no
    information and is 1.
    """

    offset: int
    block_stride: int
    head_stride: int
    num_heads: int
    tokens: Axis
    dims: Axis

    def view(self, cache: Tensor, num_blocks: int) -> PagedTensor:
        """Return the operand, sharing memory with `cache`.

        Raises RuntimeError (from torch) if the layout leaves the storage of `cache`.
        """
        tokens, dims = self.tokens, self.dims
        return PagedTensor(
            cache.as_strided(
                (
                    num_blocks,
                    tokens.size // tokens.tile,
                    tokens.tile,
                    self.num_heads,
                    dims.size // dims.tile,
                    dims.tile,
                ),
                (self.block_stride, tokens.stride, tokens.step, self.head_stride, dims.stride, dims.step),
                cache.storage_offset() + self.offset,
            )
        )


@dataclass(frozen=True)
class BlockLayout:
    """Layout of both operands in a paged cache of `num_blocks` blocks.

    They lie in one cache tensor, or in one each.
    """

    num_blocks: int
    key: OperandLayout
    value: OperandLayout

    @property
    def order(self) -> str:
        """Name the order of tokens and dimensions in a block.

        Equal in engines that can read each other's blocks as they are.
        """
        axes = (self.key.tokens, self.key.dims, self.value.tokens, self.value.dims)
        return " ".join(f"{axis.size}/{axis.tile}:{axis.step}:{axis.stride}" for axis in axes)

    def key_view(self, cache: Tensor) -> PagedTensor:
        """Return K, sharing memory with `cache`."""
        return self.key.view(cache, self.num_blocks)

    def value_view(self, cache: Tensor) -> PagedTensor:
        """Return V, sharing memory with `cache`."""
        return self.value.view(cache, self.num_blocks)


def probe_layout(
    key_cache: Tensor,
    value_cache: Tensor,
    num_blocks: int,
    block_size: int,
    num_heads: int,
    key_size: int,
    value_size: int,
    write: CacheWriter,
) -> BlockLayout:
    """Find where K and V lie by writing through the engine's own writer; the caches may be one tensor.

    The last two blocks must be spare: they are overwritten, and zeroed before this returns
    or raises. `write` gets tensors of the caches' dtype and device. Only the two blocks'
    part of a cache is read, whatever its size.

    Raises LayoutProbeError if there are fewer than two blocks, no dimension of a cache
    counts the blocks, or the layout is not separable (swizzled, quantised, data dropped).
    """
    probe = _Probe((key_cache, value_cache), num_blocks, block_size, num_heads, (key_size, value_size), write)
    try:
        layout = BlockLayout(num_blocks, probe.operand(0), probe.operand(1))
        probe.verify(layout)
    finally:
        probe.clear()
    return layout


class _Probe:
    """One probing of a cache; operand 0 is K, operand 1 is V."""

    def __init__(
        self,
        caches: tuple[Tensor, Tensor],
        num_blocks: int,
        block_size: int,
        num_heads: int,
        head_sizes: tuple[int, int],
        write: CacheWriter,
    ) -> None:
        self.caches = caches
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_heads = num_heads
        self.head_sizes = head_sizes
        self.write = write
        self.spares = [_last_blocks(cache, num_blocks) for cache in caches]
        self.first_slot = (num_blocks - _PROBED_BLOCKS) * block_size

    def clear(self) -> None:
        for spare in self.spares:
            spare.zero_()

    def operand(self, operand: int) -> OperandLayout:
        """Derive one operand's addresses from writes along each dimension."""
        name, head_size = "KV"[operand], self.head_sizes[operand]
        tokens = self._locate(operand, token=torch.arange(_PROBED_BLOCKS * self.block_size))
        origin = tokens[0]
        block = tokens[self.block_size] - origin
        heads = self._locate(operand, head=torch.arange(self.num_heads))
        dims = self._locate(operand, dim=torch.arange(head_size))
        return OperandLayout(
            offset=origin - (self.num_blocks - _PROBED_BLOCKS) * block,
            block_stride=block,
            head_stride=heads[1] - origin if self.num_heads > 1 else 1,
            num_heads=self.num_heads,
            tokens=_axis(f"{name}'s tokens", tokens[: self.block_size]),
            dims=_axis(f"{name}'s dimensions", dims),
        )

    def _locate(self, operand: int, **along: Tensor) -> list[int]:
        """Return the distances from the cache's first element of the elements `along` one dimension.

        Other indices are 0. Each element is numbered from 1, and the numbers are written bit by bit, since every dtype
        has zeros and ones.
        """
        ((axis, indices),) = along.items()
        place: dict[str, Any] = {"token": 0, "head": 0, "dim": 0, axis: indices}
        cache, spare = self.caches[operand], self.spares[operand]
        numbers = indices + 1
        found = torch.zeros(spare.shape, dtype=torch.int64)
        for bit in range(int(numbers[-1]).bit_length()):
            self.clear()
            num_tokens = len(indices) if axis == "token" else 1
            written = [torch.zeros(num_tokens, self.num_heads, size) for size in self.head_sizes]
            written[operand][place["token"], place["head"], place["dim"]] = (numbers >> bit & 1).float()
            self.write(written[0].to(cache), written[1].to(cache), self._slots(0, num_tokens))
            found += (spare != 0).cpu().long() << bit
        hits = found.nonzero()
        seen = found[tuple(hits.T)]
        if not torch.equal(seen.sort().values, numbers):
            raise LayoutProbeError(
                f"{len(numbers)} elements of {'KV'[operand]} written along its {axis}s did not change one element each",
                f"{len(hits)} elements changed in the last two blocks of a cache of shape {tuple(cache.shape)}",
                "check that num_blocks and the writer belong to this cache, and that it is not quantised",
            )
        addresses = (hits * torch.tensor(spare.stride())).sum(1)[seen.argsort()]
        start = int(spare.storage_offset() - cache.storage_offset())
        return [start + address for address in addresses.tolist()]

    def verify(self, layout: BlockLayout) -> None:
        """Fill both blocks with random data and read it back through the views."""
        self.clear()
        tokens = _PROBED_BLOCKS * self.block_size
        generator = torch.Generator().manual_seed(0)
        written = [
            torch.randn(tokens, self.num_heads, size, generator=generator).to(self.caches[0])
            for size in self.head_sizes
        ]
        self.write(written[0], written[1], self._slots(0, tokens))
        for i, operand in enumerate((layout.key, layout.value)):
            self._check("KV"[i], self.caches[i], operand, written[i])

    def _check(self, name: str, cache: Tensor, operand: OperandLayout, expected: Tensor) -> None:
        try:
            view = operand.view(cache, self.num_blocks)
        except RuntimeError as error:
            raise LayoutProbeError(f"{name} strides leave the cache", str(operand), _ADVICE) from error
        wrong = int((view[-_PROBED_BLOCKS:].reshape(expected.shape) != expected).sum())
        if wrong:
            seen = f"{wrong} of {expected.numel()} elements differ under {operand}"
            raise LayoutProbeError(f"{name} read through the probed strides is not what was written", seen, _ADVICE)

    def _slots(self, start: int, stop: int) -> Tensor:
        return torch.arange(self.first_slot + start, self.first_slot + stop, device=self.caches[0].device)


def _axis(name: str, addresses: list[int]) -> Axis:
    """Describe an axis with these addresses; raise LayoutProbeError if they are not tiles of equal steps."""
    size, origin = len(addresses), addresses[0]
    step = addresses[1] - origin if size > 1 else 1
    tile = next((i for i in range(2, size) if addresses[i] - origin != i * step), size)
    stride = addresses[tile] - origin if tile < size else 1
    if size % tile or any(a - origin != i // tile * stride + i % tile * step for i, a in enumerate(addresses)):
        raise LayoutProbeError(f"{name} do not lie in tiles of equal steps", f"distances {addresses[:40]}", _ADVICE)
    return Axis(size, tile, step, stride)


def _last_blocks(cache: Tensor, num_blocks: int) -> Tensor:
    """Return the part of `cache` holding the last two blocks: dim 0 or dim 1 counts blocks."""
    if num_blocks < _PROBED_BLOCKS:
        raise LayoutProbeError(
            "too few blocks to probe", f"num_blocks={num_blocks}", "give the cache at least two blocks"
        )
    for dim in range(min(2, cache.dim())):
        if cache.shape[dim] == num_blocks:
            return cache.narrow(dim, num_blocks - _PROBED_BLOCKS, _PROBED_BLOCKS)
    raise LayoutProbeError(
        "neither of the first two dimensions counts the blocks",
        f"shape {tuple(cache.shape)}, num_blocks={num_blocks}",
        "pass the number of blocks this cache tensor was allocated with",
    )
