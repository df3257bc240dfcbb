# SPDX-License-Identifier: Apache-2.0
"""bfloat16 K and V in words of two, as vLLM keeps them on CPUs with AMX, for compiled code.

A word of K has two neighbouring dimensions of one token, a word of V two neighbouring tokens in one dimension. The
words of 16 tokens (K) or 16 dimensions (V) lie side by side. The pool has the two elements of a word in separate runs
of memory (:func:`kernels.paged.make_pool`), so words are woven of two runs, 16 at a time.

Numba's own loops over 16 elements are not vectorized well, so the two functions that a load spends its time in are
written in explicit vectors. LLVM maps these to the instructions that the CPU has.
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple, Self

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic
from numpy.typing import NDArray
from torch import Tensor

from kernels.layout import PagedTensor
from kernels.paged import POOL_MARGIN

Array = NDArray[Any]

LANES: Final = 16
"""Words that lie side by side."""

NO_TURN: Final = -1
"""Number of the rotation of a run that is copied."""

_HIGH: Final = np.uint32(0xFFFF0000)
_LOW: Final = np.uint32(0x0000FFFF)
_SHIFT: Final = np.uint32(16)
_BYTES: Final = 2
"""Bytes of an element of the pool; a word has twice as many."""

_HALVES = ir.VectorType(ir.IntType(16), LANES)
_WORDS = ir.VectorType(ir.IntType(32), LANES)
_FLOATS = ir.VectorType(ir.FloatType(), LANES)


class PackedMemory(NamedTuple):
    """K and V in blocks: words, and their strides in words.

    ``key_strides``: of blocks, tiles of 16 tokens, heads, pairs of dimensions. ``value_strides``: of blocks, pairs of
    tokens, heads, tiles of 16 dimensions.
    """

    keys: Array
    values: Array
    key_strides: tuple[int, int, int, int]
    value_strides: tuple[int, int, int, int]

    @classmethod
    def of(cls, keys: PagedTensor, values: PagedTensor) -> Self:
        """Describe blocks that :func:`is_packed`."""
        block, tile, _, head, pair, _ = (stride // 2 for stride in keys.tiles.stride())
        of_value, pair_of_tokens, _, of_head, dims, _ = (stride // 2 for stride in values.tiles.stride())
        return cls(
            _words(keys.tiles),
            _words(values.tiles),
            (block, tile, head, pair),
            (of_value, pair_of_tokens, of_head, dims),
        )


def is_packed(keys: PagedTensor, values: PagedTensor) -> bool:
    """Whether blocks on a CPU have the layout of AMX."""
    return (
        keys.device.type == "cpu"
        and keys.dtype == values.dtype == torch.bfloat16
        and (keys.tiles.shape[2], keys.tiles.stride(2)) == (values.tiles.shape[5], values.tiles.stride(5)) == (LANES, 2)
        and (keys.tiles.shape[5], keys.tiles.stride(5)) == (values.tiles.shape[2], values.tiles.stride(2)) == (2, 1)
        and all(_has_whole_words(operand.tiles) for operand in (keys, values))
    )


def has_margin(pool: Tensor) -> bool:
    """Whether vectors may begin before and end behind the elements of a pool that they are for."""
    start = pool.storage_offset()
    end = start + sum((size - 1) * stride for size, stride in zip(pool.shape, pool.stride(), strict=True)) + 1
    return start >= POOL_MARGIN and end + POOL_MARGIN <= pool.untyped_storage().nbytes() // pool.element_size()


def _has_whole_words(tiles: Tensor) -> bool:
    even = (tiles.storage_offset(), *(stride for stride in tiles.stride() if stride != 1))
    return all(number % 2 == 0 for number in even)


def _words(tiles: Tensor) -> Array:
    last = sum((size - 1) * stride for size, stride in zip(tiles.shape, tiles.stride(), strict=True))
    memory: Array = tiles.as_strided((last + 1,), (1,)).view(torch.int32).numpy().view(np.uint32)
    return memory


def _spread(builder: Any, value: Any, kind: Any) -> Any:
    """Emit a vector of equal elements."""
    undefined, first = ir.Constant(kind, ir.Undefined), ir.Constant(ir.IntType(32), 0)
    return builder.shuffle_vector(builder.insert_element(undefined, value, first), undefined, _constant(0))


def _constant(number: int) -> Any:
    return ir.Constant(_WORDS, [number] * LANES)


def _halves(builder: Any, address: Any) -> Any:
    """Emit 16 elements of the pool as the low halves of words."""
    elements = builder.load(builder.inttoptr(address, ir.PointerType(_HALVES)), align=_BYTES)
    return builder.zext(elements, _WORDS)


def _floats(builder: Any, address: Any) -> Any:
    return builder.bitcast(builder.shl(_halves(builder, address), _constant(16)), _FLOATS)


def _rounded(builder: Any, floats: Any) -> Any:
    """Emit words whose high halves are bfloat16, rounded to nearest even.

    NaN stays NaN: the low half of a NaN that comes from bfloat16 operands is zero.
    """
    bits = builder.bitcast(floats, _WORDS)
    is_odd = builder.and_(builder.lshr(bits, _constant(16)), _constant(1))
    return builder.add(builder.add(bits, _constant(0x7FFF)), is_odd)


def _store(builder: Any, address: Any, words: Any, first: Any, end: Any) -> None:
    """Emit a store of the lanes from ``first`` to ``end``; the others keep what is there.

    All 16 are stored without a look at what is there: loads of whole tiles take a tenth less time.
    """
    pointer, numbers = builder.inttoptr(address, ir.PointerType(_WORDS)), ir.Constant(_WORDS, list(range(LANES)))
    low, high = (_spread(builder, builder.trunc(each, ir.IntType(32)), _WORDS) for each in (first, end))
    is_meant = builder.and_(builder.icmp_signed(">=", numbers, low), builder.icmp_signed("<", numbers, high))
    is_whole = builder.icmp_signed("==", builder.sub(end, first), ir.Constant(end.type, LANES))
    with builder.if_else(is_whole) as (then, otherwise):
        with then:
            builder.store(words, pointer, align=4)
        with otherwise:
            builder.store(builder.select(is_meant, words, builder.load(pointer, align=4)), pointer, align=4)


@intrinsic  # type: ignore[untyped-decorator]
def _weave(context: Any, to: Any, low: Any, high: Any, first: Any, end: Any) -> Any:
    """Write words of two runs of elements at the addresses ``low`` and ``high``."""

    def emit(target: Any, builder: Any, _: Any, arguments: Any) -> Any:
        to, low, high, first, end = arguments
        words = builder.or_(_halves(builder, low), builder.shl(_halves(builder, high), _constant(16)))
        _store(builder, to, words, first, end)
        return target.get_dummy_value()

    return types.void(*[types.uintp] * 3, *[types.intp] * 2), emit


@intrinsic  # type: ignore[untyped-decorator]
def _turn(
    context: Any, to: Any, partner: Any, source: Any, row: Any, half: Any, angles: Any, first: Any, end: Any
) -> Any:
    """Rotate two neighbouring pairs of dimensions (i, i + half) of 16 tokens, and write them to words of each half.

    ``row`` and ``half`` are distances in bytes, of the next dimension and of the pairs' other members. ``angles``: the
    cos of both pairs and the sin of both.
    """

    def emit(target: Any, builder: Any, _: Any, arguments: Any) -> Any:
        to, partner, source, row, half, angles, first, end = arguments
        cos = [_spread(builder, builder.extract_value(angles, i), _FLOATS) for i in (0, 1)]
        sin = [_spread(builder, builder.extract_value(angles, i), _FLOATS) for i in (2, 3)]
        turned = []
        for pair, address in enumerate((source, builder.add(source, row))):
            x, y = _floats(builder, address), _floats(builder, builder.add(address, half))

            def product(a: Any, b: Any) -> Any:
                return builder.fmul(a, b, flags=("contract",))

            ahead = builder.fsub(product(x, cos[pair]), product(y, sin[pair]), flags=("contract",))
            behind = builder.fadd(product(y, cos[pair]), product(x, sin[pair]), flags=("contract",))
            turned.append((_rounded(builder, ahead), _rounded(builder, behind)))
        for address, low, high in zip((to, partner), *turned, strict=True):
            words = builder.or_(builder.lshr(low, _constant(16)), builder.and_(high, _constant(0xFFFF0000)))
            _store(builder, address, words, first, end)
        return target.get_dummy_value()

    signature = types.void(*[types.uintp] * 5, types.UniTuple(types.float32, 4), *[types.intp] * 2)
    return signature, emit


compiled: Callable[..., Any] = njit(cache=True, nogil=True, error_model="numpy")


@compiled
def load_keys(
    blocks: Any, pages: Array, page_strides: Any, sizes: Any, block_tokens: int, runs: Array, cos: Array, sin: Array
) -> None:
    """Write runs of the pool's K to blocks, rotated by the run's row of ``cos`` and ``sin``, or as they are
    (row :data:`NO_TURN`).

    ``runs`` ``[n, 6]``: see :func:`kernels.numba_copier.find_runs`; a run lies in a tile of 16 tokens, which ``runs``
    counts as blocks. RoPE pairs the halves of a head's first dimensions; a multiple of four is turned.
    """
    words, (block_stride, tile_stride, head_stride, pair_stride) = blocks.keys, blocks.key_strides
    start, source_start = np.intp(words.ctypes.data), np.intp(pages.ctypes.data)
    tiles = block_tokens // LANES
    page_stride, _, page_head_stride, row = page_strides
    half = cos.shape[1]
    for run in runs:
        first, end, turn = run[1], run[1] + run[4], run[5]
        in_block = run[0] // tiles * block_stride + run[0] % tiles * tile_stride
        # The vector begins at the tile's first token, which may be before the run's.
        in_page = run[2] * page_stride + run[3] - first
        for head in range(sizes[0]):
            to = start + 4 * (in_block + head * head_stride)
            source = source_start + _BYTES * (in_page + head * page_head_stride)
            done = 0
            if turn != NO_TURN:
                for dim in range(0, half, 2):
                    angles = cos[turn, dim], cos[turn, dim + 1], sin[turn, dim], sin[turn, dim + 1]
                    _turn(
                        np.uintp(to + 4 * (dim // 2) * pair_stride),
                        np.uintp(to + 4 * ((dim + half) // 2) * pair_stride),
                        np.uintp(source + _BYTES * dim * row),
                        np.uintp(_BYTES * row),
                        np.uintp(_BYTES * half * row),
                        angles,
                        first,
                        end,
                    )
                done = 2 * half
            for dim in range(done, sizes[1], 2):
                low = source + _BYTES * dim * row
                _weave(
                    np.uintp(to + 4 * (dim // 2) * pair_stride), np.uintp(low), np.uintp(low + _BYTES * row), first, end
                )


@compiled
def save_keys(blocks: Any, pages: Array, page_strides: Any, sizes: Any, block_tokens: int, runs: Array) -> None:
    """Write runs of K in blocks to the pool; ``runs`` as for :func:`load_keys`."""
    words, (block_stride, tile_stride, head_stride, pair_stride) = blocks.keys, blocks.key_strides
    tiles = block_tokens // LANES
    page_stride, _, page_head_stride, row = page_strides
    for run in runs:
        length = run[4]
        for head in range(sizes[0]):
            source = run[0] // tiles * block_stride + run[0] % tiles * tile_stride + head * head_stride + run[1]
            to = run[2] * page_stride + run[3] + head * page_head_stride
            for pair in range(sizes[1] // 2):
                there, here = to + 2 * pair * row, source + pair * pair_stride
                of_run = words[here : here + length]
                low, high = pages[there : there + length], pages[there + row : there + row + length]
                for i in range(length):
                    low[i], high[i] = np.uint16(of_run[i] & _LOW), np.uint16(of_run[i] >> _SHIFT)


@compiled
def load_values(blocks: Any, pages: Array, page_strides: Any, sizes: Any, runs: Array) -> None:
    """Write runs of the pool's V to blocks. ``runs`` ``[n, 6]``: see :func:`kernels.numba_copier.find_runs`."""
    words, (block_stride, pair_stride, head_stride, tile_stride) = blocks.values, blocks.value_strides
    start, source_start = np.intp(words.ctypes.data), np.intp(pages.ctypes.data)
    page_stride, row, page_head_stride, _ = page_strides
    for run in runs:
        for head in range(sizes[0]):
            token, end = run[1], run[1] + run[4]
            source = run[2] * page_stride + head * page_head_stride + (run[3] - token) * row
            while token < end:
                at = run[0] * block_stride + token // 2 * pair_stride + head * head_stride
                low = source + token // 2 * 2 * row
                is_whole = token % 2 == 0 and token + 1 < end
                for tile in range(sizes[1] // LANES):
                    here, there = at + tile * tile_stride, low + tile * LANES
                    if is_whole:
                        _weave(
                            np.uintp(start + 4 * here),
                            np.uintp(source_start + _BYTES * there),
                            np.uintp(source_start + _BYTES * (there + row)),
                            0,
                            LANES,
                        )
                    elif token % 2 == 0:
                        for i in range(LANES):
                            words[here + i] = (words[here + i] & _HIGH) | np.uint32(pages[there + i])
                    else:
                        for i in range(LANES):
                            words[here + i] = (words[here + i] & _LOW) | (np.uint32(pages[there + row + i]) << _SHIFT)
                token += 2 if is_whole else 1


@compiled
def save_values(blocks: Any, pages: Array, page_strides: Any, sizes: Any, runs: Array) -> None:
    """Write runs of V in blocks to the pool; ``runs`` as for :func:`load_values`."""
    words, (block_stride, pair_stride, head_stride, tile_stride) = blocks.values, blocks.value_strides
    page_stride, row, page_head_stride, _ = page_strides
    for run in runs:
        for head in range(sizes[0]):
            for i in range(run[4]):
                token = run[1] + i
                source = run[0] * block_stride + token // 2 * pair_stride + head * head_stride
                to, shift = (
                    run[2] * page_stride + (run[3] + i) * row + head * page_head_stride,
                    np.uint32(token % 2 * 16),
                )
                for tile in range(sizes[1] // LANES):
                    here, there = source + tile * tile_stride, to + tile * LANES
                    of_tile, out = words[here : here + LANES], pages[there : there + LANES]
                    for lane in range(LANES):
                        out[lane] = np.uint16((of_tile[lane] >> shift) & _LOW)


@compiled
def widen_keys(blocks: Any, head: int, run: Any, at: int, out: Array) -> None:
    """Write a run (block, first token, length) of a head's K to ``out`` ``[D, tokens]`` from column ``at`` on.

    ``out`` has the bits of float32.
    """
    words, (block_stride, tile_stride, head_stride, pair_stride) = blocks.keys, blocks.key_strides
    block, token, length = run
    end = token + length
    while token < end:
        taken = min(LANES - token % LANES, end - token)
        tile = block * block_stride + token // LANES * tile_stride + head * head_stride + token % LANES
        for pair in range(len(out) // 2):
            here = tile + pair * pair_stride
            of_run, low, high = (
                words[here : here + taken],
                out[2 * pair, at : at + taken],
                out[2 * pair + 1, at : at + taken],
            )
            for i in range(taken):
                low[i], high[i] = of_run[i] << _SHIFT, of_run[i] & _HIGH
        token, at = token + taken, at + taken


@compiled
def widen_values(blocks: Any, head: int, run: Any, at: int, out: Array, size: int) -> None:
    """Write a run of a head's V to ``out`` ``[tokens * size]`` from token ``at`` on, as :func:`widen_keys` does K."""
    words, (block_stride, pair_stride, head_stride, tile_stride) = blocks.values, blocks.value_strides
    block, first, length = run
    for i in range(length):
        token = first + i
        source = block * block_stride + token // 2 * pair_stride + head * head_stride
        for tile in range(size // LANES):
            here, there = source + tile * tile_stride, (at + i) * size + tile * LANES
            of_tile, row = words[here : here + LANES], out[there : there + LANES]
            if token % 2:
                for lane in range(LANES):
                    row[lane] = of_tile[lane] & _HIGH
            else:
                for lane in range(LANES):
                    row[lane] = of_tile[lane] << _SHIFT
