# SPDX-License-Identifier: Apache-2.0
"""Chunk attention on a CPU, by :mod:`kernels.attention.numba_kernel`."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.attention.numba_kernel import attend
from kernels.attention.plan import AttentionPlan, ChunkAttention
from kernels.attention.softmax import merge
from kernels.attention.vectors import COLUMNS
from kernels.packed import PackedMemory, is_packed
from kernels.paged import LayerKV, strided_blocks
from kernels.rope import RotaryFrequencies
from kernels.threads import in_torch_threads

Array = NDArray[Any]

_BITS = {torch.float32: (torch.int32, np.uint32, 0), torch.bfloat16: (torch.int16, np.uint16, 16)}
"""How each dtype's memory is read: torch's and NumPy's integers, and the shift that makes them float32 bits."""


class NumbaAttention(ChunkAttention):
    """Divides the work among as many threads as torch has."""

    name = "numba"
    needs = "float32 or bfloat16 in vLLM's CPU layouts, with heads of a multiple of 16 dimensions"

    def __init__(self, layers: Sequence[LayerKV]) -> None:
        self._layers = [_Layer.of(layer) for layer in layers]

    @staticmethod
    def supports(layers: Sequence[LayerKV]) -> bool:
        """Whether K has its tokens side by side, V whole tokens, and heads fill vectors; blocks may be packed."""
        return all(map(_is_supported, layers))

    def attend(self, number: int, query: Tensor, output: Tensor, plan: AttentionPlan, scale: float) -> None:
        layer = self._layers[number]
        queries = query[plan.tokens].float().numpy()
        result = np.empty_like(queries)
        cos, sin = (table.numpy() for table in plan.angles.of(layer.frequencies))
        pieces, runs, users = map(Tensor.numpy, (plan.pieces, plan.runs, plan.users))
        step = pieces, runs, users, (cos, sin), layer.is_neox, scale, layer.num_heads
        (num_tokens, num_heads, size), shares = queries.shape, torch.get_num_threads()
        group = num_heads // layer.num_heads
        slots, rows = 2 * shares, num_tokens * group
        parts = np.full(slots, -1), np.empty((slots, rows, 2), np.float32), np.empty((slots, rows, size), np.float32)

        def compute(first: int, end: int) -> None:
            for share in range(first, end):
                attend(queries, result, layer.pool, layer.blocks, layer.shift, *step, (share, shares), parts)

        in_torch_threads(compute, shares)
        merge(result, parts, group)
        output[plan.tokens] = torch.from_numpy(result).to(output.dtype)


class _Memory(NamedTuple):
    """K and V as bits; strides of K's pages, heads and dims, of V's pages and heads; numbers of a token's V."""

    keys: Array
    values: Array
    strides: tuple[int, ...]

    @classmethod
    def of(cls, keys: Tensor, values: Tensor) -> "_Memory":
        page, _, head, dim = keys.stride()
        strides = page, head, dim, values.stride(0), values.stride(2), values.shape[3]
        return cls(_bits(keys), _bits(values), strides)


class _Layer(NamedTuple):
    """A layer as the compiled function takes it."""

    pool: _Memory
    blocks: _Memory | PackedMemory
    shift: int
    num_heads: int
    frequencies: RotaryFrequencies
    is_neox: bool

    @classmethod
    def of(cls, layer: LayerKV) -> "_Layer":
        keys = layer.key_pool
        blocks: _Memory | PackedMemory
        if is_packed(layer.key_blocks, layer.value_blocks):
            blocks = PackedMemory.of(layer.key_blocks, layer.value_blocks)
        else:
            blocks = _Memory.of(*strided_blocks(layer))
        pool = _Memory.of(keys, layer.value_pool)
        return cls(pool, blocks, _BITS[keys.dtype][2], keys.shape[2], layer.frequencies, layer.is_neox)


def _bits(view: Tensor) -> Array:
    """The memory of a view as unsigned integers, shared with it."""
    last = sum((size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True))
    signed, unsigned, _ = _BITS[view.dtype]
    memory: Array = view.as_strided((last + 1,), (1,)).view(signed).numpy().view(unsigned)
    return memory


def _is_supported(layer: LayerKV) -> bool:
    views = (layer.key_blocks, layer.key_pool, layer.value_blocks, layer.value_pool)
    kinds = {(view.device, view.dtype, tuple(view.shape[2:])) for view in views}
    ((device, dtype, (_, size)), *others) = kinds
    return (
        not others
        and device == torch.device("cpu")
        and dtype in _BITS
        and size % COLUMNS == 0
        and _has_order(layer.key_pool, layer.value_pool)
        and (
            is_packed(layer.key_blocks, layer.value_blocks)
            or _has_order(layer.key_blocks.strided, layer.value_blocks.strided)
        )
    )


def _has_order(keys: Tensor | None, values: Tensor | None) -> bool:
    """Whether K has its tokens side by side, and V whole tokens."""
    if keys is None or values is None:
        return False
    return keys.stride(1) == 1 and values.stride()[1::2] == (values.shape[3], 1)
