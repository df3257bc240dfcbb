# SPDX-License-Identifier: Apache-2.0
"""Layers whose KV cache vLLM keeps in fp8."""

from typing import Any

import torch
from torch import Tensor

from engine_ext.core.layers import attention_layers
from engine_ext.core.worker import WorkerHalf
from tests.support.ascend import Layer, Model, Rope

BLOCKS, BLOCK, HEADS, SIZE = 4, 16, 2, 64


class Writer:
    """Divides by the layer's scales, as vLLM's operators do; K and V lie side by side."""

    def do_kv_cache_update(self, layer: Any, key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
        assert key.dtype is value.dtype is torch.bfloat16
        rows = cache.view(torch.float8_e4m3fn).view(BLOCKS * BLOCK, HEADS, 2 * SIZE)
        scaled = key.float() / layer._k_scale_float, value.float() / layer._v_scale_float
        rows[slots] = torch.cat(scaled, dim=-1).to(rows.dtype)


def test_a_cache_in_fp8_is_found_through_its_writer() -> None:
    layer = Layer(
        num_kv_heads=HEADS,
        head_size=SIZE,
        dtype=torch.bfloat16,
        kv_cache_dtype="fp8",
        _k_scale_float=0.37,
        _v_scale_float=1.9,
        impl=Writer(),
    )
    cache = torch.zeros(BLOCKS, BLOCK, HEADS, 2 * SIZE, dtype=torch.uint8)
    model = Model(Rope(SIZE, True), layer)
    (found,) = attention_layers(model, {layer.layer_name: layer}, {layer.layer_name: cache})
    half = WorkerHalf(1 << 20, BLOCK, BLOCK)
    half.prepare([found])
    blocks = half.copier.layers[0]
    assert blocks.key_blocks.dtype is blocks.key_pool.dtype is torch.float8_e4m3fn
    assert half.token_bytes == HEADS * 2 * SIZE
    assert not cache.any(), "probing leaves no traces"
