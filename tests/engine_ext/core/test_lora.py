# SPDX-License-Identifier: Apache-2.0
"""Tokens without an adapter, in a step with one, through vLLM's operators for CPUs."""

import torch
from torch import nn
from vllm.lora.layers import BaseLayerWithLoRA, LoRAMapping
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

from engine_ext.core.lora import keep_plain

RANK, SIZE, SLICES = 2, 6, 3


class Layer(BaseLayerWithLoRA):
    """One adapter's matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.lora_a_stacked = tuple(torch.randn(1, 1, RANK, SIZE) for _ in range(SLICES))
        self.lora_b_stacked = tuple(torch.randn(1, 1, SIZE, RANK) for _ in range(SLICES))


def updates(layer: Layer) -> torch.Tensor:
    """Return the adapter's output for five tokens. The first two and the last run without it."""
    wrapper = PunicaWrapperCPU(max_num_batched_tokens=8, max_batches=8, device="cpu")
    wrapper.update_metadata(LoRAMapping((0, 0, 7, 7, 0), (0, 7, 0), is_prefill=True), [7], 2, 100)
    outputs, inputs = torch.zeros(5, SLICES * SIZE), torch.ones(5, SIZE)
    wrapper.add_lora_linear(outputs, inputs, layer.lora_a_stacked, layer.lora_b_stacked, 1.0, (SIZE,) * SLICES)
    return outputs


def test_they_stay_the_plain_models() -> None:
    torch.manual_seed(0)
    layer = Layer()
    before = updates(layer)
    assert before[0].any(), "vLLM's operators are right: engine_ext/core/lora.py can go"
    keep_plain(nn.ModuleList([layer]))
    after = updates(layer)
    assert not after[[0, 1, 4]].any()
    assert torch.equal(after[2:4], before[2:4])
