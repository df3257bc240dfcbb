# SPDX-License-Identifier: Apache-2.0
"""Moving float32 and bfloat16 K and V on a CPU, compiled by Numba.

Where a page of the pool keeps the order that the engine's blocks have, consecutive tokens are runs of consecutive
memory on both sides: copying them is copying memory, and rotating keys is arithmetic over contiguous vectors. torch
uses an index per element instead, which is about four times slower on one thread. This code uses one thread.

Blocks in AMX's layout are woven of the pool's runs (:mod:`kernels.packed`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np
import torch
from numba import njit, types
from numba.extending import overload
from numpy.typing import NDArray
from torch import Tensor

from kernels import packed
from kernels.packed import LANES, PackedMemory, has_margin, is_packed
from kernels.paged import KVCopier, LayerKV, strided_blocks
from kernels.rope import AngleTables, RotaryFrequencies, distinct_deltas

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


_BITS = {torch.float32: (torch.float32, np.float32), torch.bfloat16: (torch.int16, np.uint16)}
"""How each dtype's memory is read: torch's and NumPy's types."""


class NumbaCopier(KVCopier):
    """Copies runs of tokens in one block and one page, with one rotation."""

    name = "numba"

    def __init__(self, layers: Sequence[LayerKV]) -> None:
        super().__init__(layers)
        self._operands = [_PackedLayer.of(layer) if _is_packed(layer) else _Layer.of(layer) for layer in layers]

    @staticmethod
    def supports(layers: Sequence[LayerKV]) -> bool:
        """Whether this code is the fastest: runs of memory in all layers, few torch threads."""
        return torch.get_num_threads() <= MOST_TORCH_THREADS and all(
            _has_runs(layer) or _is_packed(layer) for layer in layers
        )

    def _save(self, slots: Tensor, rows: Tensor) -> None:
        spans = _Spans(slots, rows, torch.zeros_like(rows), self.layers[0])
        for layer in self._operands:
            layer.save(spans)

    def _load(self, slots: Tensor, rows: Tensor, deltas: Tensor) -> None:
        distinct, which = distinct_deltas(deltas)
        spans, angles = _Spans(slots, rows, which, self.layers[0]), AngleTables(distinct)
        for layer in self._operands:
            layer.load(spans, angles, (distinct != 0).numpy())


class _Spans:
    """Tokens to move: slots, rows and the number of each one's rotation."""

    def __init__(self, slots: Tensor, rows: Tensor, which: Tensor, layer: LayerKV) -> None:
        self._tokens = slots.numpy(), rows.numpy(), which.numpy()
        self._block_tokens, self._page_tokens = layer.key_blocks.shape[1], layer.key_pool.shape[1]

    @cached_property
    def runs(self) -> Array:
        """Runs in one block and one page, int64 ``[n, 6]``."""
        return self._runs(self._block_tokens)

    @cached_property
    def tile_runs(self) -> Array:
        """Runs in one tile of 16 tokens, which count as blocks, and one page."""
        return self._runs(LANES)

    def _runs(self, block_tokens: int) -> Array:
        runs: Array = _find_runs(*self._tokens, block_tokens, self._page_tokens)
        return runs


@dataclass(frozen=True)
class _Operand:
    """K or V in blocks or pages: memory and strides of a `[blocks, tokens, H, D]` view."""

    memory: Array
    strides: Strides
    shape: tuple[int, ...]

    @classmethod
    def of(cls, view: Tensor) -> Self:
        """`view` is float32 or bfloat16 on the CPU; the memory is shared with it."""
        last = sum((size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True))
        read_as, number = _BITS[view.dtype]
        memory = view.as_strided((last + 1,), (1,)).view(read_as).numpy().view(number)
        return cls(memory, tuple(view.stride()), tuple(view.shape))


@dataclass(frozen=True)
class _Layer:
    """A layer's operands, strided."""

    key_blocks: _Operand
    key_pool: _Operand
    value_blocks: _Operand
    value_pool: _Operand
    frequencies: RotaryFrequencies

    @classmethod
    def of(cls, layer: LayerKV) -> Self:
        keys, values = map(_Operand.of, strided_blocks(layer))
        return cls(keys, _Operand.of(layer.key_pool), values, _Operand.of(layer.value_pool), layer.frequencies)

    def save(self, spans: _Spans) -> None:
        _copy_keys(*_ends(self.key_pool, self.key_blocks), spans.runs, *_TO_PAGES)
        _copy_values(*_ends(self.value_pool, self.value_blocks), spans.runs, *_TO_PAGES)

    def load(self, spans: _Spans, angles: AngleTables, turns: Array) -> None:
        """``turns``: whether each rotation is one."""
        cos, sin = (table.numpy() for table in angles.of(self.frequencies))
        does_turn = turns[spans.runs[:, 5]]
        keys = _ends(self.key_blocks, self.key_pool)
        _rotate_keys(*keys, spans.runs[does_turn], cos, sin, self.frequencies.is_neox)
        _copy_keys(*keys, spans.runs[~does_turn], *_TO_BLOCKS)
        _copy_values(*_ends(self.value_blocks, self.value_pool), spans.runs, *_TO_BLOCKS)


@dataclass(frozen=True)
class _PackedLayer:
    """A layer whose blocks have AMX's layout."""

    blocks: PackedMemory
    key_pool: _Operand
    value_pool: _Operand
    block_tokens: int
    frequencies: RotaryFrequencies

    @classmethod
    def of(cls, layer: LayerKV) -> Self:
        blocks = PackedMemory.of(layer.key_blocks, layer.value_blocks)
        key_pool, value_pool = _Operand.of(layer.key_pool), _Operand.of(layer.value_pool)
        return cls(blocks, key_pool, value_pool, layer.key_blocks.shape[1], layer.frequencies)

    def save(self, spans: _Spans) -> None:
        keys, values = self.key_pool, self.value_pool
        packed.save_keys(self.blocks, keys.memory, keys.strides, keys.shape[2:], self.block_tokens, spans.tile_runs)
        packed.save_values(self.blocks, values.memory, values.strides, values.shape[2:], spans.runs)

    def load(self, spans: _Spans, angles: AngleTables, turns: Array) -> None:
        """``turns``: whether each rotation is one."""
        cos, sin = (table.numpy() for table in angles.of(self.frequencies))
        keys, values, runs = self.key_pool, self.value_pool, spans.tile_runs.copy()
        runs[~turns[runs[:, 5]], 5] = packed.NO_TURN
        packed.load_keys(self.blocks, keys.memory, keys.strides, keys.shape[2:], self.block_tokens, runs, cos, sin)
        packed.load_values(self.blocks, values.memory, values.strides, values.shape[2:], spans.runs)


def _has_runs(layer: LayerKV) -> bool:
    """Whether runs of tokens are runs of memory.

    In K, tokens lie side by side; in V, whole tokens follow one another.
    """
    key_blocks, value_blocks = layer.key_blocks.strided, layer.value_blocks.strided
    if key_blocks is None or value_blocks is None:
        return False
    keys, values = (key_blocks, layer.key_pool), (value_blocks, layer.value_pool)
    return (
        all(view.device.type == "cpu" and view.dtype in _BITS for view in (*keys, *values))
        and all(key.stride(1) == 1 for key in keys)
        and all(value.stride(3) == 1 and value.stride(1) == value.shape[3] for value in values)
    )


def _is_packed(layer: LayerKV) -> bool:
    """Whether blocks have AMX's layout, the pool is theirs, and RoPE pairs the halves of a multiple of four dims."""
    return (
        is_packed(layer.key_blocks, layer.value_blocks)
        and layer.is_neox
        and layer.rotary_dim % 4 == 0
        and layer.key_pool.stride(1) == layer.value_pool.stride(3) == 1
        and has_margin(layer.key_pool)
    )


def _ends(to: _Operand, source: _Operand) -> tuple[Array, Strides, Array, Strides, Strides]:
    """Both ends of a copy, as the compiled functions take them."""
    return to.memory, to.strides, source.memory, source.strides, to.shape[2:]


def _widened(number: Any) -> Any:
    """An element of memory as a float32; compiled code has the overload below."""


@overload(_widened, inline="always")  # type: ignore[untyped-decorator]
def _widened_in_numba(number: Any) -> Any:
    def of_bfloat16(number: Any) -> Any:
        return np.uint32(np.uint32(number) << np.uint32(16)).view(np.float32)

    def of_float32(number: Any) -> Any:
        return number

    return of_bfloat16 if number == types.uint16 else of_float32


def _narrowed(number: Any, like: Any) -> Any:
    """A float32 as an element of memory of the type of ``like``; bfloat16 is rounded to nearest even."""


@overload(_narrowed, inline="always")  # type: ignore[untyped-decorator]
def _narrowed_in_numba(number: Any, like: Any) -> Any:
    def to_bfloat16(number: Any, like: Any) -> Any:
        # NaN stays NaN: the low half of a NaN that comes from bfloat16 operands is zero.
        bits = np.float32(number).view(np.uint32)
        is_odd = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(1))
        return np.uint16(np.uint32(bits + np.uint32(0x7FFF) + is_odd) >> np.uint32(16))

    def to_float32(number: Any, like: Any) -> Any:
        return number

    return to_bfloat16 if like == types.uint16 else to_float32


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
def _end_of_block(runs: Array, first: int, column: int) -> int:
    """The end of the runs to or from one block (or page, by ``column``) that begin with ``first``.

    Done at once, they write memory in order, and read it in order from each of their sources.
    """
    end = first + 1
    while end < len(runs) and runs[end, column] == runs[first, column]:
        end += 1
    return end


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
    first = 0
    while first < len(runs):
        end = _end_of_block(runs, first, to_column)
        for head in range(sizes[0]):
            for dim in range(sizes[1]):
                for run in runs[first:end]:
                    length = run[4]
                    a = run[to_column] * to_strides[0] + run[to_column + 1] + head * to_strides[2] + dim * to_strides[3]
                    b = (
                        run[source_column] * source_strides[0]
                        + run[source_column + 1]
                        + head * source_strides[2]
                        + dim * source_strides[3]
                    )
                    for i in range(length):
                        to[a + i] = source[b + i]
        first = end


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
        end = _end_of_block(runs, first, 0)
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
                        first_of_pair, other_of_pair = _widened(in_one[t]), _widened(in_other[t])
                        out_one[t] = _narrowed(first_of_pair * c - other_of_pair * s, in_one[t])
                        out_other[t] = _narrowed(other_of_pair * c + first_of_pair * s, in_one[t])
            for dim in range(2 * pairs, sizes[1]):
                for run in runs[first:end]:
                    a = run[0] * block_strides[0] + run[1] + head * block_strides[2] + dim * block_strides[3]
                    x = run[2] * page_strides[0] + run[3] + head * page_strides[2] + dim * page_strides[3]
                    blocks[a : a + run[4]] = pages[x : x + run[4]]
        first = end
