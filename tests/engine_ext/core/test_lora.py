# SPDX-License-Identifier: Apache-2.0
"""Adapters on CPUs: our operators beside vLLM's, for tokens with adapters and without."""

import pytest
import torch
from torch import Tensor, nn
from vllm.lora.layers import BaseLayerWithLoRA, LoRAMapping
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

from engine_ext.core.lora import group_adapters

RANK, SIZE, SLICES = 2, 6, (6, 4, 4)


class Linear(BaseLayerWithLoRA):
    """Two adapters' matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.lora_a_stacked = tuple(torch.randn(2, 1, RANK, SIZE) for _ in SLICES)
        self.lora_b_stacked = tuple(torch.randn(2, 1, size, RANK) for size in SLICES)
        self.set_mapping(PunicaWrapperCPU(max_num_batched_tokens=8, max_batches=8, device="cpu"))

    def updates(self, adapters: tuple[int, ...], inputs: Tensor, *, is_prefill: bool = True) -> Tensor:
        """The output for tokens with the adapters of these numbers, 0 for none, one request each."""
        mapping = LoRAMapping(adapters, adapters, is_prefill=is_prefill)
        self.punica_wrapper.update_metadata(mapping, [7, 9], 2, 100)
        outputs = torch.zeros(*inputs.shape[:-1], sum(SLICES), dtype=inputs.dtype)
        self.punica_wrapper.add_lora_linear(outputs, inputs, self.lora_a_stacked, self.lora_b_stacked, 0.5, SLICES)
        return outputs


class Embedding(BaseLayerWithLoRA):
    """One adapter's second matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.lora_b_stacked = torch.randn(1, 1, SIZE, RANK)


@pytest.fixture
def layer() -> Linear:
    torch.manual_seed(0)
    return Linear()


@pytest.mark.parametrize("is_prefill", [True, False])
@pytest.mark.parametrize("adapters", [(7, 7, 7), (9, 7, 9, 9), (9,)])
def test_tokens_with_an_adapter_are_as_vllms(adapters: tuple[int, ...], is_prefill: bool, layer: Linear) -> None:
    inputs = torch.randn(len(adapters), SIZE)
    expected = layer.updates(adapters, inputs, is_prefill=is_prefill)
    group_adapters(nn.ModuleList([layer]))
    torch.testing.assert_close(layer.updates(adapters, inputs, is_prefill=is_prefill), expected)


def test_tokens_without_one_stay_the_plain_models(layer: Linear) -> None:
    inputs, adapters = torch.ones(5, SIZE), (0, 0, 7, 7, 0)
    before = layer.updates(adapters, inputs)
    assert before[0].any(), "vLLM's operators are right now: only those of embeddings may still need zeros"
    group_adapters(nn.ModuleList([layer]))
    after = layer.updates(adapters, inputs)
    assert not after[[0, 1, 4]].any()
    torch.testing.assert_close(after[2:4], before[2:4])


def test_other_shapes_and_dtypes(layer: Linear) -> None:
    group_adapters(nn.ModuleList([layer]))
    inputs = torch.randn(4, SIZE)
    expected = layer.updates((7, 0, 9, 7), inputs)
    assert torch.equal(layer.updates((7, 0, 9, 7), inputs[None])[0], expected)
    for name in ("lora_a_stacked", "lora_b_stacked"):
        setattr(layer, name, tuple(each.bfloat16() for each in getattr(layer, name)))
    found = layer.updates((7, 0, 9, 7), inputs.bfloat16())
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected, rtol=0.05, atol=0.05)


def test_embeddings_have_zeros_for_tokens_without_an_adapter() -> None:
    layer = Embedding()
    group_adapters(nn.ModuleList([layer]))
    assert layer.lora_b_stacked.shape == (2, 1, SIZE, RANK)
    assert not layer.lora_b_stacked[-1].any()
