# SPDX-License-Identifier: Apache-2.0
"""Layout of K and V inside the engine's paged KV cache tensor.

The layout is found by probing: the engine's own cache writer stores known values in two
spare blocks, and the strides are read off the elements that changed. No engine version's
layout is hard-coded, so a new one either works or raises an error.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

CacheWriter = Callable[[Tensor, Tensor, Tensor], None]
"""The engine's writer: (key [T, H, Dk], value [T, H, Dv], slots int64 [T])."""

_PROBED_BLOCKS = 2


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
class OperandLayout:
    """Affine address of one operand (K or V), in elements of the cache storage.

    `offset` counts from the cache tensor's own first element. The stride of a dimension of
    size one carries no information and is 1.
    """

    offset: int
    block_stride: int
    token_stride: int
    head_stride: int
    dim_stride: int
    num_heads: int
    head_size: int

    def view(self, cache: Tensor, num_blocks: int, block_size: int) -> Tensor:
        """Return the operand as `[num_blocks, block_size, num_heads, head_size]`, sharing memory.

        Raises RuntimeError (from torch) if the layout leaves the storage of `cache`.
        """
        return cache.as_strided(
            (num_blocks, block_size, self.num_heads, self.head_size),
            (self.block_stride, self.token_stride, self.head_stride, self.dim_stride),
            cache.storage_offset() + self.offset,
        )


@dataclass(frozen=True)
class BlockLayout:
    """Layout of both operands in a paged cache of `num_blocks` blocks of `block_size` tokens.

    They lie in one cache tensor, or in one each.
    """

    num_blocks: int
    block_size: int
    key: OperandLayout
    value: OperandLayout

    def key_view(self, cache: Tensor) -> Tensor:
        """Return K as `[num_blocks, block_size, num_heads, key_size]`, sharing memory with `cache`."""
        return self.key.view(cache, self.num_blocks, self.block_size)

    def value_view(self, cache: Tensor) -> Tensor:
        """Return V as `[num_blocks, block_size, num_heads, value_size]`, sharing memory with `cache`."""
        return self.value.view(cache, self.num_blocks, self.block_size)


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
    counts the blocks, or the layout is not affine (tiled, packed, quantised, data dropped).
    """
    probe = _Probe((key_cache, value_cache), num_blocks, block_size, num_heads, (key_size, value_size), write)
    try:
        layout = BlockLayout(num_blocks, block_size, probe.operand(0), probe.operand(1))
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
        """Derive one operand's strides from one-hot writes one step apart in each dimension."""
        head_size = self.head_sizes[operand]
        origin = self._locate(operand, 0, 0, 0)
        block = self._locate(operand, self.block_size, 0, 0) - origin
        return OperandLayout(
            offset=origin - (self.num_blocks - _PROBED_BLOCKS) * block,
            block_stride=block,
            token_stride=self._locate(operand, 1, 0, 0) - origin if self.block_size > 1 else 1,
            head_stride=self._locate(operand, 0, 1, 0) - origin if self.num_heads > 1 else 1,
            dim_stride=self._locate(operand, 0, 0, 1) - origin if head_size > 1 else 1,
            num_heads=self.num_heads,
            head_size=head_size,
        )

    def _locate(self, operand: int, token: int, head: int, dim: int) -> int:
        """Write a single one; return its distance from the cache's first element."""
        self.clear()
        cache, spare = self.caches[operand], self.spares[operand]
        one_hot = tuple(cache.new_zeros(1, self.num_heads, size) for size in self.head_sizes)
        one_hot[operand][0, head, dim] = 1
        self.write(one_hot[0], one_hot[1], self._slots(token, token + 1))
        hits = (spare != 0).nonzero()  # there is no nonzero() in 8 bits
        if len(hits) != 1:
            raise LayoutProbeError(
                f"one element of {'KV'[operand]} written at token {token}, head {head}, dim {dim} "
                "did not change one element of its block",
                f"{len(hits)} elements changed in the last two blocks of a cache of shape {tuple(cache.shape)}",
                "check that num_blocks and the writer belong to this cache, and that it is not quantised",
            )
        hit = spare[tuple(hits[0].tolist())]
        return int(hit.storage_offset() - cache.storage_offset())

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
        advice = "use an attention backend whose cache layout is affine in block, token, head and dim"
        try:
            view = operand.view(cache, self.num_blocks, self.block_size)
        except RuntimeError as error:
            raise LayoutProbeError(f"{name} strides leave the cache", str(operand), advice) from error
        wrong = int((view[-_PROBED_BLOCKS:].reshape(expected.shape) != expected).sum())
        if wrong:
            seen = f"{wrong} of {expected.numel()} elements differ under {operand}"
            raise LayoutProbeError(f"{name} read through the probed strides is not what was written", seen, advice)

    def _slots(self, start: int, stop: int) -> Tensor:
        return torch.arange(self.first_slot + start, self.first_slot + stop, device=self.caches[0].device)


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
