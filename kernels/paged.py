# SPDX-License-Identifier: Apache-2.0
"""The interface for moving K and V between the engine's paged blocks and the pool.

Each device has its implementation of :class:`KVCopier`; ``kernels.dispatch`` chooses one.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kernels.layout import PagedTensor
from kernels.rope import RotaryFrequencies


class UnsupportedKVError(ValueError):
    """No kernel moves this KV; the message has its properties and the supported ones."""


@dataclass(frozen=True)
class LayerKV:
    """One layer's K and V in engine and pool, of one dtype and device.

    `key_blocks`, `value_blocks`: the paged cache, `[blocks, block_size, H, D]` in the engine's layout.
    `key_pool`, `value_pool`: views `[pages, page_tokens, H, D]` of the pool (`make_pool`). Any
    strides; D of K and V may differ. Of multi-head latent attention, K is the part that RoPE turns
    (D = qk_rope_head_dim) and V the latent (D = kv_lora_rank), each with one head.
    """

    key_blocks: PagedTensor
    value_blocks: PagedTensor
    key_pool: Tensor
    value_pool: Tensor
    frequencies: RotaryFrequencies

    @property
    def is_neox(self) -> bool:
        """Whether RoPE pairs the halves of a head, not neighbours."""
        return self.frequencies.is_neox

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that RoPE turns."""
        return self.frequencies.rotary_dim


def pools_of(layers: Sequence[LayerKV]) -> dict[str, Tensor]:
    """Pools of each layer's K and V by name, `[pages, page_tokens, H, D]`."""
    return {
        f"{number}.{name}": pool
        for number, layer in enumerate(layers)
        for name, pool in (("key", layer.key_pool), ("value", layer.value_pool))
    }


_POOL_ALIGNMENT = 256
"""Bytes; that of PyTorch's allocator is 512, and no kernel needs more than 16."""
POOL_MARGIN = 16
"""Elements before and behind the pool of tiled blocks that kernels may read, as parts of vectors, but not use."""


class PoolMemory:
    """Memory that is allocated before the pools that share it. `num_pools` is how many there may be."""

    def __init__(self, num_bytes: int, num_pools: int, device: torch.device) -> None:
        self._memory = torch.empty(num_bytes + num_pools * _POOL_ALIGNMENT, dtype=torch.uint8, device=device)
        self._start = 0

    def restart(self) -> None:
        """Gives all memory back; what was taken must be used no more."""
        self._start = 0

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return `numel` uninitialised elements, or raise ValueError if fewer are left."""
        end = self._start + numel * dtype.itemsize
        if end > len(self._memory):
            raise ValueError(f"{numel} x {dtype} are more than the {len(self._memory) - self._start} bytes left")
        taken = self._memory[self._start : end].view(dtype)
        self._start = -(-end // _POOL_ALIGNMENT) * _POOL_ALIGNMENT
        return taken


def make_pool(blocks: PagedTensor, num_pages: int, page_tokens: int, memory: PoolMemory | None = None) -> Tensor:
    """Return an uninitialised pool `[num_pages, page_tokens, H, D]` for the operand in `blocks`.

    It lies in `memory` on the blocks' device, if there is one.
    Within a page it has the order that strided `blocks` have within a block. Of tiled ones, the axis whose neighbours
    share a word comes first, so that words are woven from two runs of memory.
    """
    sizes = (page_tokens, *blocks.shape[2:])
    if (strided := blocks.strided) is not None:
        outer_first, margin = sorted(range(3), key=lambda dim: -strided.stride(dim + 1)), 0
    else:
        token_step, dim_step = blocks.tiles.stride(2), blocks.tiles.stride(5)
        outer_first, margin = [1, 2, 0] if dim_step < token_step else [1, 0, 2], POOL_MARGIN
    shape = (num_pages, *(sizes[dim] for dim in outer_first))
    numel = math.prod(shape)
    size = numel + 2 * margin
    taken = memory.take(size, blocks.dtype) if memory else torch.empty(size, dtype=blocks.dtype, device=blocks.device)
    pool = taken[margin : margin + numel].view(shape)
    return pool.permute(0, *(1 + outer_first.index(dim) for dim in range(3)))


def strided_blocks(layer: LayerKV) -> tuple[Tensor, Tensor]:
    """Return views `[blocks, block_size, H, D]` of K and V; raise UnsupportedKVError if they are tiled."""
    keys, values = layer.key_blocks.strided, layer.value_blocks.strided
    if keys is None or values is None:
        raise UnsupportedKVError(
            f"on {layer.key_blocks.device}, K and V with one stride per axis are needed; "
            f"K has {layer.key_blocks.describe()}, V {layer.value_blocks.describe()}"
        )
    return keys, values


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to `device` without waiting for it; on a CPU, the tensor itself.

    The copy is from pinned memory, which PyTorch does not reuse before it is done.
    """
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


class KVCopier(ABC):
    """Copies K and V of all layers between blocks and pool, on the current stream.

    Slots, rows and deltas are int64 `[n]` on the CPU, n >= 0: they are checked there, and the device is not waited for.
    A slot is block * block_size + offset; a row is page * page_tokens + offset.
    """

    name: ClassVar[str]

    def __init__(self, layers: Sequence[LayerKV]) -> None:
        self.layers = tuple(layers)
        self._num_slots = min(_num_tokens(layer.key_blocks) for layer in layers)
        self._num_rows = min(_num_tokens(layer.key_pool) for layer in layers)

    def save(self, slots: Tensor, rows: Tensor) -> None:
        """Copy K and V of engine `slots` to pool `rows` in every layer, unrotated.

        Rows must not repeat. Raises ValueError on unequal lengths, IndexError on a slot or row out of range.
        """
        if self._check(slots, rows):
            self._save(slots, rows)

    def load(self, slots: Tensor, rows: Tensor, deltas: Tensor) -> None:
        """Copy pool `rows` to engine `slots` in every layer, K rotated by `deltas`.

        Slots must not repeat. A token of delta 0 is copied bit for bit. Raises as `save` does.
        """
        if self._check(slots, rows, deltas):
            self._load(slots, rows, deltas)

    @abstractmethod
    def _save(self, slots: Tensor, rows: Tensor) -> None: ...

    @abstractmethod
    def _load(self, slots: Tensor, rows: Tensor, deltas: Tensor) -> None: ...

    def _check(self, slots: Tensor, rows: Tensor, *others: Tensor) -> bool:
        """Validate a span; return whether there is anything to move."""
        lengths = [len(indices) for indices in (slots, rows, *others)]
        if len(set(lengths)) != 1:
            raise ValueError(f"slots, rows and deltas differ in length: {lengths}")
        if not lengths[0]:
            return False
        _check_bounds("slots", slots, self._num_slots)
        _check_bounds("rows", rows, self._num_rows)
        return True


def _num_tokens(view: Tensor | PagedTensor) -> int:
    return view.shape[0] * view.shape[1]


def _check_bounds(name: str, indices: Tensor, size: int) -> None:
    # Indexing would let a negative number wrap around to another request's block.
    low, high = (int(bound) for bound in torch.aminmax(indices))
    if low < 0 or high >= size:
        raise IndexError(f"{name} {low}..{high} are not all within 0..{size - 1}")
