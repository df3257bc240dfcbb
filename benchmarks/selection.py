# SPDX-License-Identifier: Apache-2.0
"""Which tokens of isolated chunks are worth computing anew: ``python -m benchmarks.selection MODEL``.

Answers the demo's questions over chunks that were computed alone (`offset`), after some of their tokens were computed
anew, each behind everything before it: the first of each chunk (LegoLink in EPIC, arXiv 2410.15332: link tokens), or
as many that the question attends to most, wherever they stand (as in ProphetKV, arXiv 2602.02579; CacheBlend, arXiv
2405.16444, chooses by another measure), or any. Measured by transformers alone, before anything is built for a server.
"""

import argparse
import itertools
import os
import random
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from evaluation.cut import cut_questions
from evaluation.demo import demo_questions
from evaluation.questions import Question
from tools.progress import say
from training.batches import Branch, Encoder
from training.episodes import Episode
from training.episodes import Question as Asked
from training.language import UNKNOWN


class Context:
    """A system segment and chunks in a row, each chunk computed behind the system segment alone.

    ``movable`` are the rows that may be computed anew: those of all chunks but the first, which has seen all before it.
    """

    def __init__(self, model: Any, system: list[int], chunks: list[list[int]]) -> None:
        self._model = model
        self.ids = torch.tensor([*system, *(token for chunk in chunks for token in chunk)])
        parts, start = [_keys_and_values(model, system, 0)], len(system)
        self.starts: list[int] = []
        for chunk in chunks:
            # Distances alone count: what is computed with everything so many positions later has the keys wanted.
            computed = _keys_and_values(model, [*system, *chunk], start - len(system))
            parts.append([(k[:, :, len(system) :], v[:, :, len(system) :]) for k, v in computed])
            self.starts.append(start)
            start += len(chunk)
        self._layers = [
            (torch.cat(keys, 2), torch.cat(values, 2)) for keys, values in map(_unzip, zip(*parts, strict=True))
        ]
        self.movable = torch.arange(self.starts[1] if len(chunks) > 1 else start, start)

    def logits(self, tail: list[int], anew: torch.Tensor) -> torch.Tensor:
        """Logits at ``tail``'s tokens, [tokens, vocabulary], with the rows ``anew`` of the context computed again."""
        logits: torch.Tensor = self._forward(tail, anew).logits[0, len(anew) :]
        return logits

    def attention(self, tail: list[int]) -> torch.Tensor:
        """How much ``tail`` attends to each row of the context, the mean over its tokens, heads and layers: [rows]."""
        weights = self._forward(tail, torch.empty(0, dtype=torch.int64), output_attentions=True).attentions
        return torch.stack([layer[0].mean((0, 1)) for layer in weights]).mean(0)[: len(self.ids)]

    @torch.no_grad()
    def _forward(self, tail: list[int], anew: torch.Tensor, **options: Any) -> Any:
        """One pass over the rows that are computed anew and ``tail``, behind those that are kept."""
        rows = torch.arange(len(self.ids))
        kept = rows[~torch.isin(rows, anew)]
        positions = torch.cat([anew, len(self.ids) + torch.arange(len(tail))])
        seen = torch.cat([kept, positions])
        cache = DynamicCache()
        for layer, (keys, values) in enumerate(self._layers):
            cache.update(keys[:, :, kept], values[:, :, kept], layer)
        hidden = seen[None, :] > positions[:, None]
        return self._model(
            torch.cat([self.ids[anew], torch.tensor(tail)])[None],
            position_ids=positions[None],
            attention_mask=torch.zeros(hidden.shape).masked_fill(hidden, float("-inf"))[None, None],
            past_key_values=cache,
            **options,
        )


@torch.no_grad()
def _keys_and_values(model: Any, ids: list[int], first: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """K and V of each layer, [1, heads, tokens, size]."""
    positions = torch.arange(first, first + len(ids))
    cache = model(torch.tensor([ids]), position_ids=positions[None], use_cache=True, logits_to_keep=1).past_key_values
    return [(layer.keys, layer.values) for layer in cache.layers]


def _unzip(pairs: Any) -> tuple[Any, Any]:
    keys, values = zip(*pairs, strict=True)
    return keys, values


def first_of_each(context: Context, number: int) -> torch.Tensor:
    """The first ``number`` rows of each chunk but the first."""
    spans = itertools.pairwise([*context.starts[1:], len(context.ids)])
    return torch.tensor(
        [row for start, end in spans for row in range(start, min(start + number, end))], dtype=torch.int64
    )


def favourites(context: Context, question: list[int], number: int) -> torch.Tensor:
    """As many rows as :func:`first_of_each` has, those that the question attends to most."""
    scores = context.attention(question)[context.movable]
    best = scores.topk(len(first_of_each(context, number))).indices
    return context.movable[best].sort().values


def any_rows(context: Context, seed: int, number: int) -> torch.Tensor:
    """As many rows as :func:`first_of_each` has, drawn at random."""
    chosen = random.Random(seed).sample(context.movable.tolist(), len(first_of_each(context, number)))
    return torch.tensor(sorted(chosen), dtype=torch.int64)


def is_right(context: Context, branch: Branch, anew: torch.Tensor) -> bool:
    """Whether greedy decoding gives the answer, in every token."""
    logits = context.logits([*branch.prompt, *branch.answer[:-1]], anew)
    return logits[len(branch.prompt) - 1 :].argmax(-1).tolist() == branch.answer


def measure(model: Any, encoder: Encoder, questions: Iterable[Question], numbers: list[int]) -> dict[str, float]:
    """The share of answers that are right, for each way to choose rows."""
    right: dict[str, list[bool]] = {}
    for seed, question in enumerate(questions):
        sample = encoder.sample(_as_episode(question))
        context = Context(model, sample.system, sample.chunks)
        for name, anew in _choices(context, sample.branches[0], seed, numbers):
            right.setdefault(name, []).append(is_right(context, sample.branches[0], anew))
    return {name: sum(answers) / len(answers) for name, answers in right.items()}


def _as_episode(question: Question) -> Episode:
    answer = question.answers[-1] if question.answers else UNKNOWN
    return Episode(question.system, question.chunks, (Asked(question.question, answer, None),))


def _choices(context: Context, branch: Branch, seed: int, numbers: list[int]) -> Iterator[tuple[str, torch.Tensor]]:
    yield "all", context.movable
    yield "none", context.movable[:0]
    for number in numbers:
        yield f"first {number}", first_of_each(context, number)
        yield f"favourites, {number} a chunk", favourites(context, branch.prompt, number)
        yield f"any, {number} a chunk", any_rows(context, seed, number)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.selection", description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="folder of a model trained by training.train")
    parser.add_argument("--questions", type=int, default=250, help="for each number of chunks (default: %(default)s)")
    parser.add_argument("--tokens", default="8,16,32", help="for each chunk but the first (default: %(default)s)")
    parser.add_argument("--cut", action="store_true", help="from documents that were cut through (evaluation/cut.py)")
    options = parser.parse_args(arguments)
    model = AutoModelForCausalLM.from_pretrained(
        options.model, attn_implementation="eager", local_files_only=True
    ).eval()
    encoder = Encoder(AutoTokenizer.from_pretrained(options.model, local_files_only=True))
    numbers = [int(number) for number in options.tokens.split(",")]
    asked = (cut_questions if options.cut else demo_questions)(options.questions)
    for chunks, questions in itertools.groupby(asked, lambda each: len(each.chunks)):
        for name, accuracy in measure(model, encoder, questions, numbers).items():
            say(f"{chunks} chunks, computed anew: {name}: {accuracy:.3f}")
    return 0


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main())
