# SPDX-License-Identifier: Apache-2.0
"""Training rows: the documents once, followed by every question in its own branch.

A row is `context | branches`. A branch sees the context and itself, never another branch, so that the model must read
instead of copying an earlier answer. The context is masked and positioned by one of the serving strategies
(`STRATEGIES`, as in the reference `tests/oracle.py`).
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

from measuring.quality.questions.demo_episodes import Episode
from research.demo_model.tokenizer import ASSISTANT, END, SYSTEM, USER

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

STRATEGIES = ("full", "shared", "offset")
SYSTEM_GROUP, PADDING = -1, -2
FIRST_TOKEN_WEIGHT = 4.0
"""Loss weight of an answer's first token, which decides between a value and ``UNKNOWN``."""
BLOCK = 32
"""Lengths are rounded up to a multiple, so that few shapes occur."""


@dataclass(frozen=True, slots=True)
class Branch:
    """Token ids of a question in its template, and of its ended answer."""

    prompt: list[int]
    answer: list[int]


@dataclass(frozen=True, slots=True)
class Sample:
    """Token ids of an episode."""

    system: list[int]
    chunks: list[list[int]]
    branches: list[Branch]


@dataclass(frozen=True, slots=True)
class Batch:
    """`rows` rows of `context + branches` tokens."""

    ids: torch.Tensor  # [rows, tokens], int64
    positions: torch.Tensor  # [rows, tokens], int64
    mask: torch.Tensor  # [rows, 1, tokens, tokens], bool: query sees key
    context: int
    """Length of the context part; the branches follow."""
    targets: torch.Tensor  # [rows, tokens], int64: next token where it counts in the loss, else -100
    weights: torch.Tensor  # [rows, tokens], float32: loss weights of the targets
    branch: torch.Tensor  # [rows, tokens], int64: branch of a token in its row; -1: context

    @property
    def num_tokens(self) -> int:
        return self.ids.numel()

    def target_branches(self) -> torch.Tensor:
        """Branch of each target, numbered across rows; [targets], int64."""
        rows = torch.arange(len(self.ids), device=self.ids.device)[:, None]
        return (rows * self.ids.shape[1] + self.branch)[self.targets >= 0]


class Encoder:
    """Encodes episodes: segments as on the server, each tokenized separately."""

    def __init__(self, tokenizer: "PreTrainedTokenizerFast") -> None:
        self._tokenizer = tokenizer

    def sample(self, episode: Episode) -> Sample:
        system = f"{SYSTEM}{episode.system}{END}{USER}"
        questions = [f"{question.text}{END}{ASSISTANT}" for question in episode.questions]
        answers = [f"{question.answer}{END}" for question in episode.questions]
        texts = [system, *(document.render() for document in episode.documents), *questions, *answers]
        ids: list[list[int]] = self._tokenizer(texts)["input_ids"]
        first, last = 1 + len(episode.documents), len(ids) - len(answers)
        branches = [Branch(*pair) for pair in zip(ids[first:last], ids[last:], strict=True)]
        return Sample(ids[0], ids[1:first], branches)


def repeat_sample(rng: random.Random, vocabulary: int, alphabet: int, chunks: int, branches: int) -> Sample:
    """Random chunks over `alphabet` tokens, with excerpts to continue.

    Continuing requires the skill of answering: find the same tokens in a chunk and go on from there. A smaller alphabet
    requires comparing more preceding tokens.
    """
    letters = rng.sample(range(256 + 4, vocabulary), alphabet)
    texts = [rng.choices(letters, k=rng.randint(20, 40)) for _ in range(chunks)]
    pieces = []
    for _ in range(branches):
        text = rng.choice(texts)
        start = rng.randrange(len(text) - 14)
        known = rng.randint(3, 6)
        pieces.append(Branch(text[start : start + known], text[start + known : start + 14]))
    return Sample(rng.choices(letters, k=4), texts, pieces)


def make_batch(samples: Sequence[Sample], strategies: Sequence[str]) -> Batch:
    """Pads the samples to one shape; sample `i` is laid out by `strategies[i]`."""
    contexts = [_context(sample, strategy) for sample, strategy in zip(samples, strategies, strict=True)]
    tails = [_branches(sample, start) for sample, (*_, start) in zip(samples, contexts, strict=True)]
    context = _round_up(max(len(ids) for ids, *_ in contexts))
    length = context + _round_up(max(len(ids) for ids, *_ in tails))
    ids, positions, groups, branch, targets = (torch.zeros(len(samples), length, dtype=torch.long) for _ in range(5))
    groups.fill_(PADDING)
    branch.fill_(-1)
    targets.fill_(-100)
    for row, ((c_ids, c_positions, c_groups, _), (t_ids, t_positions, t_branch, t_targets)) in enumerate(
        zip(contexts, tails, strict=True)
    ):
        here, there = slice(0, len(c_ids)), slice(context, context + len(t_ids))
        for tensor, values in ((ids, c_ids), (positions, c_positions), (groups, c_groups)):
            tensor[row, here] = torch.tensor(values)
        for tensor, values in ((ids, t_ids), (positions, t_positions), (branch, t_branch), (targets, t_targets)):
            tensor[row, there] = torch.tensor(values)
    full = torch.tensor([strategy == "full" for strategy in strategies])
    first = (targets >= 0) & (targets.roll(1, dims=1) < 0)
    weights = torch.where(first, FIRST_TOKEN_WEIGHT, 1.0)
    return Batch(ids, positions, _mask(groups, branch, full), context, targets, weights, branch)


def _context(sample: Sample, strategy: str) -> tuple[list[int], list[int], list[int], int]:
    """Ids, positions and groups of system and chunks, and the position after them."""
    start = len(sample.system)
    lengths = [len(chunk) for chunk in sample.chunks]
    starts = list(accumulate(lengths, initial=start))
    after = starts.pop()
    if strategy == "shared":
        starts, after = [start] * len(lengths), start + max(lengths, default=0)
    ids, positions, groups = list(sample.system), list(range(start)), [SYSTEM_GROUP] * start
    for index, (chunk, first) in enumerate(zip(sample.chunks, starts, strict=True)):
        ids += chunk
        positions += range(first, first + len(chunk))
        groups += [index] * len(chunk)
    return ids, positions, groups, after


def _branches(sample: Sample, start: int) -> tuple[list[int], list[int], list[int], list[int]]:
    """Ids, positions, branch numbers and targets of all branches in a row."""
    ids: list[int] = []
    positions: list[int] = []
    numbers: list[int] = []
    targets: list[int] = []
    for number, branch in enumerate(sample.branches):
        tokens = [*branch.prompt, *branch.answer[:-1]]
        ids += tokens
        positions += range(start, start + len(tokens))
        numbers += [number] * len(tokens)
        targets += [-100] * (len(branch.prompt) - 1) + branch.answer
    return ids, positions, numbers, targets


def _mask(groups: torch.Tensor, branch: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
    length = groups.shape[1]
    query, key = groups[:, :, None], groups[:, None, :]
    key_is_context = key != PADDING
    in_branch, branch_query, branch_key = branch[:, :, None] >= 0, branch[:, :, None], branch[:, None, :]
    visible = (key == SYSTEM_GROUP) | (key == query) & key_is_context | full[:, None, None] & key_is_context
    visible = visible | in_branch & (key_is_context | (branch_key == branch_query))
    visible = visible & torch.ones(length, length, dtype=torch.bool).tril()
    return (visible | torch.eye(length, dtype=torch.bool))[:, None]  # padding sees itself, so that no row is empty


def _round_up(length: int) -> int:
    return -(-length // BLOCK) * BLOCK


_TENSORS = ("ids", "positions", "mask", "targets", "weights", "branch")


def to_device(batch: Batch, device: Any) -> Batch:
    """Moves the batch's tensors to `device`."""
    tensors = {name: getattr(batch, name).to(device) for name in _TENSORS}
    return replace(batch, **tensors)
