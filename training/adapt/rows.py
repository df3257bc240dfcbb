# SPDX-License-Identifier: Apache-2.0
"""Training rows: a context of chunks, followed by branches, each a question with its answer.

A branch sees the context and itself, never another branch, so that one context serves several questions. Indices,
positions and turns are those of the server's layout (:mod:`cache.positions.layout`): a chunk's keys are computed
behind the system segment, and turned to their place for branches.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from cache.positions.layout import ChunkedPrompt, PositionReindexer, PositionStrategy, TokenIds

Way = Literal["full", "offset", "shared", "parallel"]
"""How the branches see the context; ``full`` is full attention."""

_SYSTEM = -1


@dataclass(frozen=True, slots=True)
class Branch:
    """A question segment's tokens, and the answer's."""

    question: TokenIds
    answer: TokenIds

    @property
    def tokens(self) -> TokenIds:
        """The tokens that the model reads: all but the last one of the answer."""
        return self.question + self.answer[:-1]


@dataclass(frozen=True, slots=True)
class Row:
    """One context of ``num_context`` tokens with its branches, ``n`` tokens in all.

    ``ids`` and ``positions`` ``[1, n]``, int64; ``turns`` ``[num_context]``, int64: by how many positions branches see
    a key turned; ``context_mask`` ``[1, 1, num_context, num_context]`` and ``branch_mask`` ``[1, 1, n - num_context,
    n]``, bool: query sees key; ``is_chunk`` ``[n]``, bool: the token is a chunk's own.
    """

    ids: Tensor
    positions: Tensor
    turns: Tensor
    context_mask: Tensor
    branch_mask: Tensor
    is_chunk: Tensor
    num_context: int

    @property
    def num_tokens(self) -> int:
        """Number of tokens."""
        return self.ids.shape[1]

    def to(self, device: Any) -> "Row":
        """The row on a device."""
        names = ("ids", "positions", "turns", "context_mask", "branch_mask", "is_chunk")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})


def make_row(prompt: ChunkedPrompt, branches: Sequence[Branch], way: Way) -> Row:
    """Lays out ``prompt``, whose own question doesn't count, with ``branches``."""
    num_context = prompt.num_context_tokens
    context = prompt.token_ids[:num_context]
    positions, turns, groups = list(range(num_context)), [0] * num_context, [_SYSTEM] * num_context
    if way != "full":
        layout = PositionReindexer().layout(prompt, PositionStrategy(way))
        computed = len(prompt.chunk_prefix)
        for number, place in enumerate((layout.system, *layout.chunks)):
            inside = slice(place.start, place.start + place.length)
            first = computed if number else 0
            positions[inside] = range(first, first + place.length)
            turns[inside] = [place.delta] * place.length
            groups[inside] = [number - 1] * place.length
    tokens = [token for branch in branches for token in branch.tokens]
    places = [num_context + index for branch in branches for index in range(len(branch.tokens))]
    numbers = torch.tensor([number for number, branch in enumerate(branches) for _ in branch.tokens])
    group = torch.tensor(groups)
    seen = (group[None] == _SYSTEM) | (group[None] == group[:, None])
    own = (numbers[None] == numbers[:, None]).tril()
    whole = torch.ones(len(tokens), num_context, dtype=torch.bool)
    return Row(
        torch.tensor([[*context, *tokens]]),
        torch.tensor([[*positions, *places]]),
        torch.tensor(turns),
        seen.tril()[None, None],
        torch.cat([whole, own], dim=1)[None, None],
        torch.cat([group != _SYSTEM, torch.zeros(len(tokens), dtype=torch.bool)]),
        num_context,
    )
