# SPDX-License-Identifier: Apache-2.0
"""Adapters on CPUs: tokens are multiplied together, and those without an adapter stay the plain model's.

vLLM's operators for CPUs copy the adapter's matrices for each token, which takes several times as long as the model's
own layers. And they give a token without an adapter the index -1 where others in the step have one, and so the last
adapter's matrices.
"""

from typing import Any

import torch
from torch import Tensor, nn
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU


class GroupedAdapters(PunicaWrapperCPU):
    """vLLM's operators, but those of linear layers for all consecutive tokens with the same adapter at once."""

    def add_lora_linear(
        self,
        y: Tensor,
        x: Tensor,
        lora_a_stacked: tuple[Tensor, ...],
        lora_b_stacked: tuple[Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        **options: Any,
    ) -> None:
        """Add the adapters' updates to the output ``y`` of a linear layer, for its input ``x``."""
        inputs, outputs = x.reshape(-1, x.shape[-1]), y.view(-1, y.shape[-1])
        adapters, counts = self.token_lora_indices[: len(inputs)].unique_consecutive(return_counts=True)
        end = 0
        for adapter, count in zip(adapters.tolist(), counts.tolist(), strict=True):
            tokens = slice(end, end := end + count)
            if adapter < 0:
                continue
            first = 0
            for a, b, size in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
                update = (inputs[tokens] @ a[adapter, 0].T * scale) @ b[adapter, 0].T
                outputs[tokens, first : first + size] += update
                first += size


def group_adapters(model: nn.Module) -> None:
    """Have a model on the CPU compute adapters so."""
    for layer in model.modules():
        if not isinstance(layer, BaseLayerWithLoRA):
            continue
        if isinstance(wrapper := getattr(layer, "punica_wrapper", None), PunicaWrapperCPU):
            grouped = GroupedAdapters.__new__(GroupedAdapters)
            grouped.__dict__ = wrapper.__dict__  # which vLLM keeps up to date
            layer.set_mapping(grouped)
        # Embeddings and logits, which users' adapters may have, take vLLM's operators: -1 finds zeros.
        if isinstance(stacked := getattr(layer, "lora_b_stacked", None), Tensor):
            layer.lora_b_stacked = torch.cat([stacked, torch.zeros_like(stacked[:1])])
