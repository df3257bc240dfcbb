# SPDX-License-Identifier: Apache-2.0
"""Adapters in the worker: tokens without one stay the plain model's."""

import torch
from torch import nn
from vllm.lora.layers import BaseLayerWithLoRA


def keep_plain(model: nn.Module) -> None:
    """Puts a matrix of zeros behind the adapters' second ones in each layer of a model on the CPU.

    vLLM's operators for CPUs give a token without an adapter the index -1 where others in the step have one, and so
    the last adapter's matrices.
    """
    for layer in model.modules():
        if isinstance(layer, BaseLayerWithLoRA) and hasattr(layer, "lora_b_stacked"):
            found = layer.lora_b_stacked
            layer.lora_b_stacked = (
                _with_zeros(found) if isinstance(found, torch.Tensor) else tuple(map(_with_zeros, found))
            )


def _with_zeros(matrices: torch.Tensor) -> torch.Tensor:
    """``[adapters, ...]`` with one more, of zeros."""
    return torch.cat([matrices, torch.zeros_like(matrices[:1])])
