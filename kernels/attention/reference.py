# SPDX-License-Identifier: Apache-2.0
"""The reference of chunk attention, token by token: the oracle of tests and check scripts."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kernels.attention.plan import POOL, AttentionPlan, ChunkAttention
from kernels.paged import LayerKV
from kernels.rope import rotate_keys, rotation_angles


class ReferenceAttention(ChunkAttention):
    """Rotates keys instead of queries; one softmax over all logits of a token, in float64."""

    name = "reference"

    def __init__(self, layers: Sequence[LayerKV]) -> None:
        self._layers = layers

    def attend(self, number: int, query: Tensor, output: Tensor, plan: AttentionPlan, scale: float) -> None:
        layer, num_heads = self._layers[number], query.shape[1]
        for index, token in enumerate(map(int, plan.tokens)):
            logits, values = [], []
            for seen_keys, seen_values in self._seen(layer, plan, index):
                keys = seen_keys.double().repeat_interleave(num_heads // seen_keys.shape[1], dim=1)
                logits.append(torch.einsum("hd,thd->ht", query[token].double(), keys) * scale)
                values.append(seen_values.double().repeat_interleave(num_heads // seen_values.shape[1], dim=1))
            weights = torch.cat(logits, dim=1).softmax(1)
            output[token] = torch.einsum("ht,thd->hd", weights, torch.cat(values)).to(output.dtype)

    def _seen(self, layer: LayerKV, plan: AttentionPlan, index: int) -> Iterator[tuple[Tensor, Tensor]]:
        """K, at its place, and V of a token's pieces: ``[tokens, H, D]`` each."""
        pieces: list[list[int]] = plan.pieces.tolist()
        for source, first_run, end_run, first_user, end_user in pieces:
            for user, turn, seen in plan.users[first_user:end_user].tolist():
                if user != index:
                    continue
                memory = (
                    (layer.key_pool, layer.value_pool) if source == POOL else (layer.key_blocks, layer.value_blocks)
                )
                runs = plan.runs[first_run:end_run].tolist()
                keys, values = (
                    torch.cat([each[page][at : at + length] for page, at, length in runs])[:seen] for each in memory
                )
                cos, sin = rotation_angles(layer.frequencies, plan.deltas[turn : turn + 1])
                yield rotate_keys(keys.float(), cos, sin, layer.is_neox), values
