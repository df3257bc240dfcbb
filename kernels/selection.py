# SPDX-License-Identifier: Apache-2.0
"""Policies that score segments, or blocks, by representations of their keys.

All of them give each query logits with some items of each segment; its attention is then shared between the segments
by the softmax over all of them (:func:`shares`, :func:`block_shares`).
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, Final

import torch
from torch import Tensor

_CHANNELS: Final = 0.25

Representation = Mapping[str, Tensor]
"""Tensors that stand for a segment's keys in one layer."""


class SelectionPolicy(ABC):
    """Stands for keys ``[tokens, KV heads, D]`` of a segment, with RoPE, by less."""

    name: ClassVar[str]

    @abstractmethod
    def represent(self, keys: Tensor) -> Representation:
        """The representation of ``keys``: new tensors."""

    @abstractmethod
    def logits(self, query: Tensor, kept: Representation) -> Tensor:
        """Logits ``[KV heads, rows, items]`` of queries ``[KV heads, rows, D]``, float32, not yet scaled."""


class AttentionPolicy(SelectionPolicy):
    """All keys: the model's own attention in the layer."""

    name = "attention"

    def represent(self, keys: Tensor) -> Representation:
        """The keys, heads first."""
        return {"keys": keys.transpose(0, 1).contiguous()}

    def logits(self, query: Tensor, kept: Representation) -> Tensor:
        """Products with each key."""
        return query @ kept["keys"].float().transpose(1, 2)


class ChannelsPolicy(SelectionPolicy):
    """The quarter of each head's channels whose keys are largest, as in KVStar."""

    name = "channels"

    def represent(self, keys: Tensor) -> Representation:
        """The largest channels' indices and keys, heads first."""
        heads = keys.transpose(0, 1)
        channels = heads.float().abs().mean(1).topk(int(_CHANNELS * keys.shape[2]), dim=-1).indices
        chosen = heads.gather(2, channels[:, None].expand(-1, keys.shape[0], -1))
        return {"channels": channels, "keys": chosen.contiguous()}

    def logits(self, query: Tensor, kept: Representation) -> Tensor:
        """Products over these channels alone."""
        chosen = query.gather(2, kept["channels"][:, None].expand(-1, query.shape[1], -1))
        return chosen @ kept["keys"].float().transpose(1, 2)


POLICIES: Final[Mapping[str, SelectionPolicy]] = {
    policy.name: policy for policy in (AttentionPolicy(), ChannelsPolicy())
}
"""``attention`` scores chunks, ``channels`` blocks for generated tokens."""


def shares(policy: SelectionPolicy, queries: Sequence[Tensor], kept: Sequence[Representation], scale: float) -> Tensor:
    """Attention to each segment in one layer, float32 ``[segments]``, summed over some tokens.

    ``queries`` ``[tokens, heads, D]`` are turned to their distance from each segment in turn. Each head's attention to
    all segments together is 1; heads are averaged.
    """
    masses = []
    for query, representation in zip(queries, kept, strict=True):
        tokens, heads, size = query.shape
        kv_heads = next(iter(representation.values())).shape[0]
        # Heads that share a KV head are next to each other.
        grouped = query.float().view(tokens, kv_heads, -1, size).transpose(0, 1).reshape(kv_heads, -1, size)
        logits = policy.logits(grouped, representation) * scale
        masses.append(logits.logsumexp(-1).flatten())
    # Rows are heads of all tokens, in some order: their sum over the number of heads is the tokens' sum.
    return torch.stack(masses, -1).softmax(-1).sum(0) / heads


def represent_blocks(policy: SelectionPolicy, keys: Tensor) -> Representation:
    """Representations of blocks ``[blocks, tokens, KV heads, D]``: tensors ``[blocks, KV heads, …]``."""
    blocks, tokens, heads, size = keys.shape
    kept = policy.represent(keys.transpose(0, 1).reshape(tokens, blocks * heads, size))
    return {name: tensor.view(blocks, heads, *tensor.shape[1:]) for name, tensor in kept.items()}


def block_shares(policy: SelectionPolicy, query: Tensor, kept: Representation, scale: float) -> Tensor:
    """A token's attention to each block, float32 ``[KV heads, blocks]``; ``query`` is ``[heads, D]``.

    ``kept`` are representations of :func:`represent_blocks`. Each head's attention to all blocks together is 1; the
    heads that share a KV head are averaged.
    """
    blocks, kv_heads = next(iter(kept.values())).shape[:2]
    grouped = query.float().view(kv_heads, -1, query.shape[1]).repeat(blocks, 1, 1)
    logits = policy.logits(grouped, {name: tensor.flatten(0, 1) for name, tensor in kept.items()}) * scale
    return logits.logsumexp(-1).view(blocks, kv_heads, -1).softmax(0).mean(-1).T
