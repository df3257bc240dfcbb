# SPDX-License-Identifier: Apache-2.0
"""Blocks that each generated token attends to, chosen anew in each layer and step.

Tokens of the prompt attend to everything. A token behind it reads as many blocks as the budget has, for each KV head:
the first, the last ones, and those between that its own query attends to most, by representations of their keys. It
makes no difference whether it is computed alone, with drafts, or again after a preemption.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Final

import torch
from torch import Tensor

from engine_ext.core.attention.rows import BatchRow
from engine_ext.wire.plan import TransferPlan
from kernels.paged import LayerKV
from kernels.selection import Representation, SelectionPolicy, block_shares, represent_blocks

_FIRST: Final = 1
_LAST: Final = 2
"""Blocks that are always read: the first, which takes the attention that goes nowhere else, and the last."""
LEAST_BLOCKS: Final = _FIRST + _LAST + 1


@dataclass(frozen=True, slots=True)
class SparseStep:
    """A step with tokens that read some blocks.

    Attributes:
        tokens: their numbers in the step, int64.
        lengths: tokens that each reads.
        blocks: all blocks before and of each, int64.
        fresh: blocks to represent, int64.
        dense: what reads everything: parts of the step's rows, by their number.
    """

    tokens: Tensor
    lengths: list[int]
    blocks: list[Tensor]
    fresh: Tensor
    dense: list[tuple[int, BatchRow]]


class DecodingSelection:
    """Chooses blocks in the ``layers``, within a budget of blocks; ``prompts`` has the lengths of requests' prompts.

    Representations are kept beside vLLM's blocks, as long as the same request holds them step by step.
    """

    def __init__(
        self,
        layers: Mapping[str, LayerKV],
        policy: SelectionPolicy,
        num_blocks: int,
        prompts: Callable[[Sequence[str]], Sequence[int]],
    ) -> None:
        if num_blocks < LEAST_BLOCKS:
            raise ValueError(f"a budget of {num_blocks} blocks is less than {LEAST_BLOCKS}")
        self._layers = layers
        self._policy = policy
        self._num_blocks = num_blocks
        self._prompts = prompts
        self._block_tokens = next(iter(layers.values())).key_blocks.shape[1]
        self._represented: dict[str, list[int]] = {}
        """By request, its represented blocks: those behind the first, in order."""
        self._kept: dict[str, dict[str, Tensor]] = {name: {} for name in layers}

    @property
    def is_idle(self) -> bool:
        """False: any request may generate a token behind the budget."""
        return False

    def update(self, started: Mapping[str, TransferPlan], ended: Iterable[str]) -> None:
        """Do nothing: which blocks are represented shows in each step's rows."""

    @property
    def layers(self) -> frozenset[str]:
        """Names of the layers that choose."""
        return frozenset(self._layers)

    def step(self, rows: Sequence[BatchRow]) -> SparseStep | None:
        """Plans a step; ``None`` if all of its tokens read everything."""
        size, represented = self._block_tokens, dict[str, list[int]]()
        tokens, lengths, blocks, fresh, dense = [], list[int](), list[Tensor](), list[int](), []
        prompts = self._prompts([row.request_id for row in rows])
        for number, (prompt, row) in enumerate(zip(prompts, rows, strict=True)):
            begin = row.length - row.num_tokens
            cut = min(max(begin, prompt, self._num_blocks * size), row.length)
            if cut > begin:
                dense.append((number, row._replace(num_tokens=cut - begin, length=cut)))
            if cut == row.length:
                continue
            table = torch.tensor(row.blocks[: -(-row.length // size)])
            for position in range(cut, row.length):
                tokens.append(row.first + position - begin)
                lengths.append((self._num_blocks - 1) * size + position % size + 1)
                blocks.append(table[: position // size + 1])
            known = self._represented.get(row.request_id, [])
            if begin < (_FIRST + len(known)) * size:
                known = []  # they are being written again
            represented[row.request_id] = candidates = table[_FIRST:-_LAST].tolist()
            fresh += [new for old, new in zip_longest(known, candidates) if new is not None and new != old]
        # Blocks of requests that are not in this step may pass to others.
        self._represented = represented
        if not tokens:
            return None
        return SparseStep(torch.tensor(tokens), lengths, blocks, torch.tensor(fresh, dtype=torch.int64), dense)

    def table(self, layer: str, query: Tensor, step: SparseStep, scale: float) -> Tensor:
        """Blocks that each token reads, int32 ``[tokens, KV heads, blocks]``; ``query`` is ``[tokens, heads, D]``."""
        kept = self._represent(layer, step.fresh)
        return torch.stack(
            [self._chosen(kept, each, blocks, scale) for each, blocks in zip(query, step.blocks, strict=True)]
        ).int()

    def _represent(self, layer: str, blocks: Tensor) -> Representation:
        kept, keys = self._kept[layer], self._layers[layer].key_blocks
        if len(blocks):
            for name, tensor in represent_blocks(self._policy, keys[blocks]).items():
                if name not in kept:
                    kept[name] = tensor.new_empty(keys.shape[0], *tensor.shape[1:])
                kept[name][blocks] = tensor
        return kept

    def _chosen(self, kept: Representation, query: Tensor, blocks: Tensor, scale: float) -> Tensor:
        between = blocks[_FIRST:-_LAST]
        shares = block_shares(self._policy, query, {name: each[between] for name, each in kept.items()}, scale)
        best = between[shares.topk(self._num_blocks - _FIRST - _LAST).indices.sort().values]
        first, last = (each.expand(len(best), -1) for each in (blocks[:_FIRST], blocks[-_LAST:]))
        return torch.cat([first, best, last], 1)
