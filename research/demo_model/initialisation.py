# SPDX-License-Identifier: Apache-2.0
"""Initialises the first layer's heads to attend one, two, three … tokens back.

Finding a fact by its preceding words takes two heads: one that carries the preceding token forward, and an induction
head that compares it (Olsson et al. 2022, arXiv 2209.11895). Each is useless alone, so training from random weights
stalls until both have formed by chance. This module supplies the first head. With RoPE, a few numbers suffice: every
token's key is the same vector `u`, and every query is `u` rotated back by `d` positions; their product then depends on
the distance alone, with its maximum at distance `d`. Training may change the heads.
"""

from collections.abc import Sequence
from typing import Any

import torch

_SHARPNESS = 30.0
"""Attention score at the target distance, several more than at neighbouring distances."""
_FREQUENCIES = 5
"""Number of RoPE's highest frequencies that encode the distance."""


@torch.no_grad()
def look_back(model: Any, distances: Sequence[int]) -> None:
    """Makes head `i` of the first layer attend `distances[i]` tokens back.

    Channel 0 of the embedding becomes a constant, so that all tokens share a component.
    """
    embedding = model.model.embed_tokens.weight
    spread, width = float(embedding.std()), embedding.shape[1]
    constant = 4.0
    embedding[:, 0] = constant * spread
    normalised = constant / ((width - 1 + constant**2) / width) ** 0.5
    attention = model.model.layers[0].self_attn
    size = attention.head_dim
    frequencies = model.model.rotary_emb.inv_freq[:_FREQUENCIES].float()
    amplitude = (_SHARPNESS * size**0.5 / _FREQUENCIES) ** 0.5 / normalised
    first, second = slice(0, _FREQUENCIES), slice(size // 2, size // 2 + _FREQUENCIES)
    for head, distance in enumerate(distances):
        rows = slice(head * size, (head + 1) * size)
        query, key = attention.q_proj.weight[rows], attention.k_proj.weight[rows]
        query *= 0.1
        key *= 0.1
        query[:, 0] = key[:, 0] = 0.0
        key[first, 0] = amplitude
        query[first, 0] = amplitude * torch.cos(distance * frequencies)
        query[second, 0] = -amplitude * torch.sin(distance * frequencies)
