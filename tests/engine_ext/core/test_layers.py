# SPDX-License-Identifier: Apache-2.0
"""Layers whose KV cache vLLM keeps in fp8."""

from typing import Any

import pytest
import torch
from torch import Tensor

from engine_ext.core.layers import AttentionLayer, attention_layers
from engine_ext.core.worker import PoolSizeError, WorkerHalf
from kernels.paged import PoolMemory, pools_of
from tests.support.ascend import Layer, Model, Rope

BLOCKS, BLOCK, HEADS, SIZE = 4, 16, 2, 64


class Writer:
    """Divides by the layer's scales, as vLLM's operators do; K and V lie side by side."""

    def do_kv_cache_update(self, layer: Any, key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
        assert key.dtype is value.dtype is torch.bfloat16
        rows = cache.view(torch.float8_e4m3fn).view(BLOCKS * BLOCK, HEADS, 2 * SIZE)
        scaled = key.float() / layer._k_scale_float, value.float() / layer._v_scale_float
        rows[slots] = torch.cat(scaled, dim=-1).to(rows.dtype)


def fp8_layer() -> tuple[AttentionLayer, Tensor]:
    """A layer, and its cache."""
    sizes: Any = {"num_kv_heads": HEADS, "head_size": SIZE, "dtype": torch.bfloat16, "kv_cache_dtype": "fp8"}
    layer = Layer(**sizes, _k_scale_float=0.37, _v_scale_float=1.9, impl=Writer())
    cache = torch.zeros(BLOCKS, BLOCK, HEADS, 2 * SIZE, dtype=torch.uint8)
    model = Model(Rope(SIZE, True), layer)
    (found,) = attention_layers(model, {layer.layer_name: layer}, {layer.layer_name: cache})
    return found, cache


def test_a_cache_in_fp8_is_found_through_its_writer() -> None:
    found, cache = fp8_layer()
    half = WorkerHalf(1 << 20, BLOCK, BLOCK)
    half.prepare([found])
    blocks = half.copier.layers[0]
    assert blocks.key_blocks.dtype is blocks.key_pool.dtype is torch.float8_e4m3fn
    assert half.token_bytes == HEADS * 2 * SIZE
    assert not cache.any(), "probing leaves no traces"


def test_a_pool_lies_in_the_memory_that_was_reserved_and_has_as_many_pages() -> None:
    found, _ = fp8_layer()
    layers = [found] * 3
    plain, reserved = WorkerHalf(100_000, BLOCK, BLOCK), WorkerHalf(100_000, BLOCK, BLOCK)
    reserved._memory = PoolMemory(reserved.pool_bytes, 2 * len(layers), torch.device("cpu"))
    for _ in range(2):  # as a self-check that is run again
        assert reserved.prepare(layers) == plain.prepare(layers)
    pools = pools_of(reserved.copier.layers).values()
    for number, pool in enumerate(pools):
        pool.view(torch.uint8).fill_(number)
    assert [set(pool.view(torch.uint8).unique().tolist()) for pool in pools] == [{number} for number in range(6)]
    memory = reserved._memory._memory
    starts = [pool.data_ptr() - memory.data_ptr() for pool in pools]
    assert all(0 <= start <= len(memory) - pool.numel() for start, pool in zip(starts, pools, strict=True))
    reserved.release()
    with pytest.raises(PoolSizeError):
        reserved.check_room(0)
