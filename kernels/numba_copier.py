# SPDX-License-Identifier: Apache-2.0
"""Moving float32 K and V on a CPU, compiled by Numba.

Where a page of the pool keeps the order that the engine's blocks have, consecutive tokens are runs of consecutive
memory on both sides: copying them is copying memory, and rotating keys is arithmetic over contiguous vectors. torch
uses an index per element instead, which is about four times slower on one thread. This code uses one thread.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numba import njit, types
from numpy.typing import NDArray
from torch import Tensor

from kernels.paged import KVCopier, LayerKV
from kernels.rope import AngleTables, distinct_deltas

Array = NDArray[Any]
Strides = tuple[int, ...]

MOST_TORCH_THREADS = 4
"""With more threads torch's own copies are faster than one thread here."""

# libc's copies whole runs faster than a compiled loop does.
_memcpy = types.ExternalFunction("memcpy", types.uintp(types.uintp, types.uintp, types.uintp))

# Columns of a run: block, offset in it, page, offset in it, number of tokens, index of its rotation.
_COLUMNS = 6
# Columns of target and source.
_TO_BLOCKS, _TO_PAGES = (0, 2), (2, 0)


class NumbaCopier(KVCopier):
    """Copies runs of tokens in one block and one page, with one rotation."""

    name = "numba"

    def __init__(self, layers: Sequence[LayerKV]) -> None:
        super().__init__(layers)
        self._operands = [_Layer.of(layer) for layer in layers]

    @staticmethod
    def supports(layers: Sequence[LayerKV]) -> bool:
        """Whether this code is the fastest: runs of memory in all layers, few torch threads."""
        return torch.get_num_threads() <= MOST_TORCH_THREADS and all(map(_has_runs, layers))

    def _save(self, slots: Tensor, rows: Tensor) -> None:
        runs = self._runs(slots, rows, torch.zeros_like(rows))
        for layer in self._operands:
            _copy_keys(*_ends(layer.key_pool, layer.key_blocks), runs, *_TO_PAGES)
            _copy_values(*_ends(layer.value_pool, layer.value_blocks), runs, *_TO_PAGES)

    def _load(self, slots: Tensor, rows: Tensor, deltas: Tensor) -> None:
        distinct, which = distinct_deltas(deltas)
        runs, angles = self._runs(slots, rows, which), AngleTables(distinct)
        does_turn = (distinct != 0).numpy()[runs[:, 5]]
        turning, still = runs[does_turn], runs[~does_turn]
        for layer, operands in zip(self.layers, self._operands, strict=True):
            cos, sin = (table.numpy() for table in angles.of(layer.frequencies))
            keys = _ends(operands.key_blocks, operands.key_pool)
            _rotate_keys(*keys, turning, cos, sin, layer.is_neox)
            _copy_keys(*keys, still, *_TO_BLOCKS)
            _copy_values(*_ends(operands.value_blocks, operands.value_pool), runs, *_TO_BLOCKS)

    def _runs(self, slots: Tensor, rows: Tensor, which: Tensor) -> Array:
        """Int64 `[runs, 6]`; `which` is each token's rotation."""
        block_size, page_tokens = self.layers[0].key_blocks.shape[1], self.layers[0].key_pool.shape[1]
        runs: Array = _find_runs(slots.numpy(), rows.numpy(), which.numpy(), block_size, page_tokens)
        return runs


@dataclass(frozen=True)
class _Operand:
    """K or V in blocks or pages: memory and strides of a `[blocks, tokens, H, D]` view."""

    memory: Array
    strides: Strides
    shape: tuple[int, ...]

    @classmethod
    def of(cls, view: Tensor) -> Self:
        """`view` is float32 on the CPU; the memory is shared with it."""
        last = sum((size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True))
        return cls(view.as_strided((last + 1,), (1,)).numpy(), tuple(view.stride()), tuple(view.shape))


@dataclass(frozen=True)
class _Layer:
    """A layer's operands."""

    key_blocks: _Operand
    key_pool: _Operand
    value_blocks: _Operand
    value_pool: _Operand

    @classmethod
    def of(cls, layer: LayerKV) -> Self:
        return cls(*map(_Operand.of, (layer.key_blocks, layer.key_pool, layer.value_blocks, layer.value_pool)))


def _has_runs(layer: LayerKV) -> bool:
    """Whether runs of tokens are runs of memory.

    In K, tokens lie side by side; in V, whole tokens follow one another.
    """
    keys, values = (layer.key_blocks, layer.key_pool), (layer.value_blocks, layer.value_pool)
    return (
        all(view.device.type == "cpu" and view.dtype == torch.float32 for view in (*keys, *values))
        and all(key.stride(1) == 1 for key in keys)
        and all(value.stride(3) == 1 and value.stride(1) == value.shape[3] for value in values)
    )


def _ends(to: _Operand, source: _Operand) -> tuple[Array, Strides, Array, Strides, Strides]:
    """Both ends of a copy, as the compiled functions take them."""
    return to.memory, to.strides, source.memory, source.strides, to.shape[2:]


@njit(cache=True, nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def _find_runs(slots: Array, rows: Array, which: Array, block_size: int, page_tokens: int) -> Array:
    runs = np.empty((len(slots), _COLUMNS), np.int64)
    count = 0
    for i in range(len(slots)):
        slot, row = slots[i], rows[i]
        follows = i > 0 and slot == slots[i - 1] + 1 and row == rows[i - 1] + 1 and which[i] == which[i - 1]
        if follows and slot % block_size != 0 and row % page_tokens != 0:
            runs[count - 1, 4] += 1
            continue
        runs[count, 0], runs[count, 1] = slot // block_size, slot % block_size
        runs[count, 2], runs[count, 3] = row // page_tokens, row % page_tokens
        runs[count, 4], runs[count, 5] = 1, which[i]
        count += 1
    return runs[:count]


@njit(cache=True, nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def _copy_keys(
    to: Array,
    to_strides: Strides,
    source: Array,
    source_strides: Strides,
    sizes: Strides,
    runs: Array,
    to_column: int,
    source_column: int,
) -> None:
    for run in runs:
        length = run[4]
        for head in range(sizes[0]):
            for dim in range(sizes[1]):
                a = run[to_column] * to_strides[0] + run[to_column + 1] + head * to_strides[2] + dim * to_strides[3]
                b = (
                    run[source_column] * source_strides[0]
                    + run[source_column + 1]
                    + head * source_strides[2]
                    + dim * source_strides[3]
                )
                to[a : a + length] = source[b : b + length]


@njit(cache=True, nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def _copy_values(
    to: Array,
    to_strides: Strides,
    source: Array,
    source_strides: Strides,
    sizes: Strides,
    runs: Array,
    to_column: int,
    source_column: int,
) -> None:
    to_start, source_start, width = to.ctypes.data, source.ctypes.data, to.itemsize
    for run in runs:
        length = run[4] * sizes[1]
        for head in range(sizes[0]):
            a = run[to_column] * to_strides[0] + run[to_column + 1] * to_strides[1] + head * to_strides[2]
            b = (
                run[source_column] * source_strides[0]
                + run[source_column + 1] * source_strides[1]
                + head * source_strides[2]
            )
            _memcpy(to_start + a * width, source_start + b * width, length * width)


@njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract"})  # type: ignore[untyped-decorator]
def _rotate_keys(
    blocks: Array,
    block_strides: Strides,
    pages: Array,
    page_strides: Strides,
    sizes: Strides,
    runs: Array,
    cos: Array,
    sin: Array,
    is_neox: bool,
) -> None:
    pairs, first = cos.shape[1], 0
    while first < len(runs):
        # All runs of a block at once: memory is then written in order, and read in order from each of their pages.
        end = first + 1
        while end < len(runs) and runs[end, 0] == runs[first, 0]:
            end += 1
        for head in range(sizes[0]):
            for pair in range(pairs):
                one, other = (pair, pair + pairs) if is_neox else (2 * pair, 2 * pair + 1)
                for run in runs[first:end]:
                    length, c, s = run[4], cos[run[5], pair], sin[run[5], pair]
                    to = run[0] * block_strides[0] + run[1] + head * block_strides[2]
                    source = run[2] * page_strides[0] + run[3] + head * page_strides[2]
                    a, b = to + one * block_strides[3], to + other * block_strides[3]
                    x, y = source + one * page_strides[3], source + other * page_strides[3]
                    # Slices, so that the compiler sees that no index wraps around.
                    out_one, out_other = blocks[a : a + length], blocks[b : b + length]
                    in_one, in_other = pages[x : x + length], pages[y : y + length]
                    for t in range(length):
                        out_one[t] = in_one[t] * c - in_other[t] * s
                        out_other[t] = in_other[t] * c + in_one[t] * s
            for dim in range(2 * pairs, sizes[1]):
                for run in runs[first:end]:
                    a = run[0] * block_strides[0] + run[1] + head * block_strides[2] + dim * block_strides[3]
                    x = run[2] * page_strides[0] + run[3] + head * page_strides[2] + dim * page_strides[3]
                    blocks[a : a + run[4]] = pages[x : x + run[4]]
        first = end
