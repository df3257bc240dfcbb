# SPDX-License-Identifier: Apache-2.0
"""A head start: the first layer's heads begin by looking one, two, three … tokens back.

Finding a fact by the words before it takes two steps, one head that carries what stood before a token, and one that
compares it (an induction head; Olsson et al. 2022, arXiv 2209.11895). Neither is of use without the other, and so from
random weights training stands still until both have turned up by chance. Here the first one is given. RoPE makes that
a matter of a few numbers: let every token's key be the same vector `u`, and every query `u` turned back by `d`
positions; their product depends on the distance alone, and is greatest at distance `d`. Training is free to change it.
"""

from collections.abc import Sequence
from typing import Any

import torch

_SHARPNESS = 30.0
"""Score at the distance looked for; several more than at its neighbours."""
_FREQUENCIES = 5
"""How many of RoPE's highest frequencies tell distances apart."""


@torch.no_grad()
def look_back(model: Any, distances: Sequence[int]) -> None:
    """Makes head `i` of the first layer look `distances[i]` tokens back.

    Channel 0 of the embedding becomes a constant, the one thing that all tokens have in common.
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
