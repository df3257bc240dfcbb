# SPDX-License-Identifier: Apache-2.0
"""Accuracy of sparse requests by policy and budget, and how often the right chunks are kept, in plain transformers.

Each question is answered greedily with composed chunks (``offset``): all of them, and those that each policy keeps of
each budget. The policies' scores are the server's: queries of the question behind the system segment alone.

    python scripts/measure_sparse.py ~/.cache/tessera/models/SmolLM2-135M-Instruct results.jsonl --layers 20
    python scripts/measure_sparse.py --table results.jsonl
    python scripts/measure_sparse.py --layers-of MODEL       # recall of each layer, for --layers

An interrupted run goes on where it was.
"""

import argparse
import json
import random
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from cache.positions.layout import ChunkedPrompt
from cache.selection import Sparse, choose
from kernels.selection import POLICIES, shares
from measuring.quality.metrics import score
from measuring.quality.questions.plain_english import plain_questions
from measuring.quality.questions.questions import Question
from scripts.measure_temperature import KeysAndValues, Reader, interval, read_lines, tempered

BUDGETS: Final = (0.10, 0.25, 0.50)
CHUNKS: Final = (16, 32)
_CALIBRATION: Final = 60
"""Questions for the choice of layers; :func:`measure` leaves them out."""


def caught(module: Any, query: Tensor, key: Tensor, value: Tensor, *given: Any, caught: Any = None, **more: Any) -> Any:
    """Attention as in ``measure_temperature``; adds the layer's queries to ``caught``, if given."""
    if caught is not None:
        caught.append(query[0].transpose(0, 1))
    return tempered(module, query, key, value, *given, **more)


ALL_ATTENTION_FUNCTIONS.register("rows_tempered", caught)


class SparseReader(Reader):
    """Answers one question in several rows, each with some of the chunks."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, (1.0,), ("offset",))
        self._hidden: Tensor | None = None

    @property
    def num_layers(self) -> int:
        """The model's layers."""
        return len(self._layer_types)

    @torch.inference_mode()
    def scores(self, question: Question, names: Iterable[str], layers: Sequence[int]) -> dict[tuple[str, int], Any]:
        """Each chunk's share of the question's attention, by policy and layer."""
        prompt = self.prompt(question)
        start, place = len(prompt.system), len(prompt.system)
        queries = self._probe(prompt)
        kept: dict[tuple[str, int], list[Any]] = defaultdict(list)
        for chunk in prompt.chunks:
            computed = self._remembered([*prompt.system, *chunk.token_ids])
            moved = self._moved([(keys[:, :, start:], values) for keys, values in computed], place - start)
            place += chunk.num_tokens
            for name in names:
                for layer in layers:
                    kept[name, layer].append(POLICIES[name].represent(moved[layer][0][0].transpose(0, 1)))
        scale = queries[0].shape[-1] ** -0.5
        return {
            (name, layer): shares(POLICIES[name], [queries[layer]] * len(parts), parts, scale) / len(prompt.question)
            for (name, layer), parts in kept.items()
        }

    def _probe(self, prompt: ChunkedPrompt) -> list[Tensor]:
        """The queries of the question behind the system segment, at its place behind all chunks, by layer."""
        cache, found = DynamicCache(), list[Tensor]()
        for layer, (keys, values) in enumerate(self._remembered(prompt.system)):
            cache.update(keys, values, layer)
        first, seen, count = prompt.num_context_tokens, len(prompt.system), len(prompt.question)
        mask = torch.zeros(count, seen + count)
        mask[:, seen:] = torch.full((count, count), torch.finfo(torch.float32).min).triu(1)
        self._model(
            input_ids=torch.tensor([prompt.question]),
            position_ids=torch.arange(first, first + count)[None],
            past_key_values=cache,
            attention_mask=mask[None, None],
            caught=found,
        )
        return found

    def answered(self, question: Question, keeping: Sequence[Sequence[int]], max_tokens: int) -> list[Any]:
        """The answer and the log probability of the right one, with each of these sets of chunks."""
        prompt = self.prompt(question)
        self._hidden = torch.zeros(len(keeping), 1, 1, prompt.num_context_tokens)
        at = len(prompt.system)
        for index, chunk in enumerate(prompt.chunks):
            for row, kept in enumerate(keeping):
                if index not in kept:
                    self._hidden[row, :, :, at : at + chunk.num_tokens] = torch.finfo(torch.float32).min
            at += chunk.num_tokens
        self._temperatures = torch.ones(len(keeping))
        return self.answers(question, max_tokens)

    def _composed(self, prompt: ChunkedPrompt, way: str) -> KeysAndValues:
        parts = super()._composed(prompt, way)
        rows = len(self._temperatures)
        return [(keys.expand(rows, -1, -1, -1), values.expand(rows, -1, -1, -1)) for keys, values in parts]

    def _masks(self, positions: Tensor) -> Any:
        masks = super()._masks(positions)
        if self._hidden is None or len(positions) == int(positions[-1]) + 1:
            return masks  # of a segment alone
        assert isinstance(masks, Tensor), "sliding windows are not measured"
        rows = masks.expand(len(self._hidden), -1, -1, -1).clone()
        rows[..., : self._hidden.shape[-1]] += self._hidden
        return rows.clamp(min=torch.finfo(torch.float32).min)


def right_chunks(question: Question) -> set[int]:
    """The chunks with the answer's text; empty if there is none, or it is in several."""
    found = {
        index
        for index, chunk in enumerate(question.chunks)
        if any(answer.lower() in chunk.text.lower() for answer in question.answers)
    }
    return found if len(found) == 1 else set()


def _questions(limit: int, *, calibration: bool) -> list[Question]:
    """Questions behind each number of chunks; those for calibration are never measured."""
    found = []
    for number in CHUNKS:
        questions = plain_questions(10_000, numbers=(number,))
        found += questions[:_CALIBRATION] if calibration else questions[_CALIBRATION : _CALIBRATION + limit]
    random.Random("sparse").shuffle(found)  # an interrupted run has all numbers of chunks
    return found


def layers_of(folder: Path) -> None:
    """Prints how often each layer has the right chunk among the best quarter, the best layers first."""
    reader, hits, count = SparseReader(folder), defaultdict[int, int](int), 0
    layers = range(reader.num_layers)
    for question in _questions(0, calibration=True):
        if not (right := right_chunks(question)):
            continue
        count += 1
        for (_, layer), scores in reader.scores(question, ["attention"], layers).items():
            best = scores.topk(len(question.chunks) // 4).indices.tolist()
            hits[layer] += bool(right & set(best))
        print(f"\r{count} questions", end="", file=sys.stderr, flush=True)
    for layer in sorted(layers, key=lambda layer: -hits[layer]):
        print(f"layer {layer}: {hits[layer] / count:.2f}")


def measure(folder: Path, output: Path, limit: int, layers: Sequence[int], max_tokens: int) -> None:
    """Appends a line to ``output`` for each question: each policy's and budget's chunks, and what they answer."""
    done = {line["id"] for line in read_lines([output])} if output.exists() else set()
    reader = SparseReader(folder)
    questions = _questions(limit, calibration=False)
    with output.open("a") as file:
        for number, question in enumerate(questions, start=1):
            if question.id in done:
                continue
            scores = reader.scores(question, POLICIES, layers)
            lengths = [chunk.num_tokens for chunk in reader.prompt(question).chunks]
            kept = {"all": list(range(len(lengths)))}
            for name in POLICIES:
                mean = torch.stack([scores[name, layer] for layer in layers]).mean(0).tolist()
                for budget in BUDGETS:
                    kept[f"{name} {budget:g}"] = choose(mean, lengths, Sparse(budget_share=budget))
            distinct = sorted(set(map(tuple, kept.values())))
            answers = dict(zip(distinct, reader.answered(question, distinct, max_tokens), strict=True))
            rows = {}
            for name, chunks in kept.items():
                text, logprob = answers[tuple(chunks)]
                accuracy = score(text, question.answers).accuracy
                rows[name] = {"kept": chunks, "answer": text, "accuracy": accuracy, "logprob": logprob}
            right = sorted(right_chunks(question))
            line = {"id": question.id, "chunks": len(lengths), "right": right, "rows": rows}
            print(json.dumps(line), file=file, flush=True)
            print(f"\r{number} of {len(questions)}", end="", file=sys.stderr, flush=True)


def table(paths: Iterable[Path]) -> None:
    """Prints accuracy minus that with all chunks, with 95 % intervals, and how often the right chunk is kept."""
    groups = defaultdict(list)
    for line in read_lines(paths):
        groups[line["chunks"]].append(line)
    for chunks, lines in sorted(groups.items()):
        everything = 100 * sum(line["rows"]["all"]["accuracy"] for line in lines) / len(lines)
        print(f"{chunks} chunks, {len(lines)} questions: all {everything:.1f} %")
        for name in lines[0]["rows"]:
            rows = [(line["rows"][name], line["rows"]["all"], line["right"]) for line in lines]
            points = [100 * (row["accuracy"] - base["accuracy"]) for row, base, _ in rows]
            nats = [row["logprob"] - base["logprob"] for row, base, _ in rows if base["logprob"] is not None]
            recall = [set(right) <= set(row["kept"]) for row, _, right in rows if right]
            share = 100 * sum(recall) / len(recall)
            print(f"  {name}: {interval(points)} points, {interval(nats)} nats, right chunk kept {share:.0f} %")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("model", nargs="?", type=Path, help="folder of the model")
    parser.add_argument("output", nargs="?", type=Path, help="file of results, a line for each question")
    parser.add_argument("--limit", type=int, default=300, help="questions for each number of chunks (default: 300)")
    parser.add_argument("--layers", type=int, nargs="+", help="layers that score the chunks")
    parser.add_argument("--layers-of", type=Path, metavar="MODEL", help="print the recall of each layer")
    parser.add_argument("--max-tokens", type=int, default=32, help="longest answer (default: 32)")
    parser.add_argument("--threads", type=int, default=2, help="threads (default: 2)")
    parser.add_argument("--table", type=Path, nargs="+", metavar="FILE", help="print the table of these results")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.table:
        table(args.table)
    elif args.layers_of:
        layers_of(args.layers_of)
    else:
        measure(args.model, args.output, args.limit, args.layers, args.max_tokens)


if __name__ == "__main__":
    main()
