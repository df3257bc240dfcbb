# SPDX-License-Identifier: Apache-2.0
"""Stand-ins of an Ascend engine."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn


class Rope(nn.Module):
    """Table-driven like vLLM's: GPT-J style, for a narrow part of the head."""

    def __init__(self, width: int, is_neox_style: bool) -> None:
        super().__init__()
        self.head_size, self.rotary_dim, self.is_neox_style = width, width, is_neox_style
        self.cos_sin_cache = self._compute_cos_sin_cache()

    def _compute_cos_sin_cache(self) -> Tensor:
        inv_freq = 1.0 / 10000.0 ** (torch.arange(0, self.rotary_dim, 2, dtype=torch.float) / self.rotary_dim)
        angles = torch.outer(torch.arange(256, dtype=torch.float), inv_freq)
        return torch.cat((angles.cos(), angles.sin()), dim=-1)

    def forward_native(self, positions: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self.cos_sin_cache[positions].chunk(2, dim=-1)
        if self.is_neox_style:
            one, other = key.chunk(2, dim=-1)
            return query, torch.cat((one * cos - other * sin, other * cos + one * sin), dim=-1)
        one, other = key[..., ::2], key[..., 1::2]
        return query, torch.stack((one * cos - other * sin, other * cos + one * sin), dim=-1).flatten(-2)


class Layer(nn.Module):
    """vLLM's attention layer, reduced to the attributes in use."""

    def __init__(self, **fields: Any) -> None:
        super().__init__()
        self.layer_name, self.impl = "model.layers.0.attn", SimpleNamespace()
        vars(self).update(fields)


class Model(nn.Module):
    def __init__(self, rope: Rope, layer: Layer) -> None:
        super().__init__()
        self.rotary_emb, self.attn = rope, layer
