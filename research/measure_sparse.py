# SPDX-License-Identifier: Apache-2.0
"""Accuracy of sparse requests by policy and budget, and how often the right chunks are kept, in plain transformers.

Each question is answered greedily with composed chunks (``offset``): all of them, and those that each policy keeps of
each budget. The policies' scores are the server's: queries of the question behind the system segment alone.

    python research/measure_sparse.py ~/.cache/tessera/models/SmolLM2-135M-Instruct results.jsonl --layers 20
    python research/measure_sparse.py --table results.jsonl
    python research/measure_sparse.py --layers-of MODEL       # recall of each layer, for --layers
    python research/measure_sparse.py models/demo demo.jsonl --layers 3 --demo

An interrupted run goes on where it was.
"""

import argparse
import json
import random
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from cache.positions.layout import ChunkedPrompt
from cache.sparse import Sparse, choose
from kernels.selection import POLICIES, shares
from measuring.quality.metrics import score
from measuring.quality.questions.demo import demo_questions
from measuring.quality.questions.plain_english import plain_questions
from measuring.quality.questions.questions import Question
from research.measure_contexts import batches, interval, read_lines
from research.reader import KeysAndValues, Reader, Row

BUDGETS: Final = (0.10, 0.25, 0.50)
CHUNKS: Final = (16, 32)
_CALIBRATION: Final = 60
"""Questions for the choice of layers; :func:`measure` leaves them out."""


class Probe(Row):
    """A row that keeps its queries, ``[heads, tokens, head size]`` for each layer."""

    def __init__(self, context: KeysAndValues, room: int, position: int) -> None:
        super().__init__(context, room, position)
        self.queries: list[Tensor] = []

    def attention(self, module: Any, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """See :meth:`Row.attention`."""
        self.queries.append(query)
        return super().attention(module, query, key, value, scaling)


class SparseReader(Reader):
    """Answers each question in several rows, each with some of the chunks."""

    def __init__(self, folder: Path, *, closes_gaps: bool = False) -> None:
        super().__init__(folder, ())
        self._closes_gaps = closes_gaps
        self._keeping: Iterator[Sequence[Sequence[int]]] = iter(())

    @property
    def num_layers(self) -> int:
        """The model's layers."""
        return len(self._layer_types)

    @torch.inference_mode()
    def scores(self, question: Question, names: Iterable[str], layers: Sequence[int]) -> dict[tuple[str, int], Any]:
        """Each chunk's share of the question's attention, by policy and layer."""
        prompt = self.prompt(question)
        system, *chunks = self._parts(prompt, "offset")
        probe = Probe(system, len(prompt.question), prompt.num_context_tokens)
        self._forward([prompt.question], [probe])
        found = {}
        for layer in layers:
            queries = [probe.queries[layer].transpose(0, 1)] * len(chunks)
            for name in names:
                parts = [POLICIES[name].represent(chunk[layer][0].transpose(0, 1)) for chunk in chunks]
                scale = queries[0].shape[-1] ** -0.5
                found[name, layer] = shares(POLICIES[name], queries, parts, scale) / len(prompt.question)
        return found

    def choices(self, question: Question, layers: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """The chunks that are kept: all, and by policy and budget."""
        scores = self.scores(question, POLICIES, layers)
        lengths = [chunk.num_tokens for chunk in self.prompt(question).chunks]
        kept = {"all": tuple(range(len(lengths)))}
        for name in POLICIES:
            mean = torch.stack([scores[name, layer] for layer in layers]).mean(0).tolist()
            for budget in BUDGETS:
                kept[f"{name} {budget:g}"] = tuple(choose(mean, lengths, Sparse(budget_share=budget)))
        return kept

    def answered(
        self, questions: Sequence[Question], choices: Iterable[dict[str, tuple[int, ...]]], max_tokens: int
    ) -> list[dict[tuple[int, ...], tuple[str, float | None]]]:
        """For each question, by the chunks kept: the answer and the log probability of the right one."""
        sets = [sorted(set(kept.values())) for kept in choices]
        self._keeping = iter(sets)
        answers = self.answers(questions, max_tokens)
        return [dict(zip(*each, strict=True)) for each in zip(sets, answers, strict=True)]

    def _contexts(self, prompt: ChunkedPrompt) -> Iterator[tuple[KeysAndValues, int]]:
        """See :meth:`Reader._contexts`. The question stays where it is behind all chunks."""
        system, *chunks = self._parts(prompt, "offset")
        position = prompt.num_context_tokens
        for kept in next(self._keeping):
            if self._closes_gaps:
                shorter = prompt.keeping(kept)
                left_out = position - shorter.num_context_tokens
                context = self._joined(self._moved(part, left_out) for part in self._parts(shorter, "offset"))
            else:
                context = self._joined([system, *(chunks[index] for index in kept)])
            yield context, position


def right_chunks(question: Question) -> set[int]:
    """The chunks with the answer's text; empty if there is none, or it is in several."""
    found = {
        index
        for index, chunk in enumerate(question.chunks)
        if any(answer.lower() in chunk.text.lower() for answer in question.answers)
    }
    return found if len(found) == 1 else set()


def _questions(limit: int, *, calibration: bool, demo: bool) -> list[Question]:
    """Questions behind each number of chunks; those for calibration are never measured."""
    asked, found = demo_questions if demo else plain_questions, []
    for number in CHUNKS:
        questions = asked(_CALIBRATION + limit, numbers=(number,))
        found += questions[:_CALIBRATION] if calibration else questions[_CALIBRATION:]
    random.Random("sparse").shuffle(found)  # an interrupted run has all numbers of chunks
    return found


def layers_of(folder: Path, *, demo: bool) -> None:
    """Prints how often each layer has the right chunk among the best quarter, the best layers first."""
    reader, hits, count = SparseReader(folder), defaultdict[int, int](int), 0
    layers = range(reader.num_layers)
    for question in _questions(0, calibration=True, demo=demo):
        if not (right := right_chunks(question)):
            continue
        count += 1
        for (_, layer), scores in reader.scores(question, ["attention"], layers).items():
            best = scores.topk(len(question.chunks) // 4).indices.tolist()
            hits[layer] += bool(right & set(best))
        print(f"\r{count} questions", end="", file=sys.stderr, flush=True)
    for layer in sorted(layers, key=lambda layer: -hits[layer]):
        print(f"layer {layer}: {hits[layer] / count:.2f}")


def measure(
    folder: Path,
    output: Path,
    limit: int,
    layers: Sequence[int],
    max_tokens: int,
    *,
    demo: bool,
    closes_gaps: bool = False,
) -> None:
    """Appends a line to ``output`` for each question: each policy's and budget's chunks, and what they answer."""
    reader = SparseReader(folder, closes_gaps=closes_gaps)
    with output.open("a") as file:
        for batch in batches(_questions(limit, calibration=False, demo=demo), output):
            choices = [reader.choices(question, layers) for question in batch]
            told = reader.answered(batch, choices, max_tokens)
            for question, kept, answers in zip(batch, choices, told, strict=True):
                rows = {}
                for name, chunks in kept.items():
                    text, logprob = answers[chunks]
                    accuracy = score(text, question.answers).accuracy
                    rows[name] = {"kept": chunks, "answer": text, "accuracy": accuracy, "logprob": logprob}
                right = sorted(right_chunks(question))
                line = {"id": question.id, "chunks": len(question.chunks), "right": right, "rows": rows}
                print(json.dumps(line), file=file, flush=True)


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
    parser.add_argument("--demo", action="store_true", help="the demo model's questions")
    parser.add_argument("--close", action="store_true", help="the chunks kept follow one another (gaps: close)")
    parser.add_argument("--max-tokens", type=int, default=32, help="longest answer (default: 32)")
    parser.add_argument("--threads", type=int, default=2, help="threads (default: 2)")
    parser.add_argument("--table", type=Path, nargs="+", metavar="FILE", help="print the table of these results")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.table:
        table(args.table)
    elif args.layers_of:
        layers_of(args.layers_of, demo=args.demo)
    elif args.layers is None:
        parser.error("--layers is missing: see --layers-of")
    else:
        options = {"demo": args.demo, "closes_gaps": args.close}
        measure(args.model, args.output, args.limit, args.layers, args.max_tokens, **options)


if __name__ == "__main__":
    main()
