# SPDX-License-Identifier: Apache-2.0
"""Accuracy in full attention and with composed chunks, in plain transformers.

Each question is answered greedily in each context.

    python research/measure_contexts.py ~/.cache/tessera/models/SmolLM2-135M-Instruct results.jsonl --limit 400
    python research/measure_contexts.py --table results.jsonl
    python research/measure_contexts.py --table other.jsonl --against results.jsonl

An interrupted run goes on where it was. Models: one kind of RoPE for each kind of layer, without scaling.
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

from measuring.kit.statistics import interval
from measuring.quality.metrics import score
from measuring.quality.questions.plain_english import plain_questions
from measuring.quality.questions.questions import Question
from research.reader import Reader

CONTEXTS: Final = ("full", "offset")
"""Contexts by default; ``shared``, ``parallel`` and ``isolated``, the scope, are others."""
_AT_ONCE: Final = 32
"""Questions that are answered together."""


def measure(
    folder: Path,
    output: Path,
    limit: int,
    part: slice,
    contexts: Sequence[str],
    max_tokens: int,
) -> None:
    """Appends a line to ``output`` for each question: accuracy and log probability in each context."""
    reader = Reader(folder, contexts)
    questions = plain_questions(limit)
    random.Random("contexts").shuffle(questions)  # an interrupted run has all numbers of chunks
    with output.open("a") as file:
        for batch in batches(questions[part], output):
            for question, answers in zip(batch, reader.answers(batch, max_tokens), strict=True):
                rows = {
                    name: {"answer": text, "accuracy": score(text, question.answers).accuracy, "logprob": logprob}
                    for name, (text, logprob) in zip(contexts, answers, strict=True)
                }
                line = {"id": question.id, "chunks": len(question.chunks), "rows": rows}
                print(json.dumps(line), file=file, flush=True)


def batches(questions: Iterable[Question], output: Path) -> Iterator[list[Question]]:
    """Yields the questions without a line in ``output``, several at a time, and prints the progress."""
    done = {line["id"] for line in read_lines([output])}
    wanted = [question for question in questions if question.id not in done]
    for first in range(0, len(wanted), _AT_ONCE):
        yield (batch := wanted[first : first + _AT_ONCE])
        print(f"\r{first + len(batch)} of {len(wanted)}", end="", file=sys.stderr, flush=True)


def table(paths: Iterable[Path]) -> None:
    """Prints accuracy in full attention, and how far the other contexts are from it.

    In points of accuracy and in nats of the right answer's log probability, with 95 % intervals of paired questions.
    """
    for chunks, lines in _by_chunks((line["chunks"], line["rows"]) for line in read_lines(paths)):
        full = 100 * sum(rows["full"]["accuracy"] for rows in lines) / len(lines)
        print(f"{chunks} chunks, {len(lines)} questions: full {full:.1f} %")
        _print_differences([(rows, rows["full"]) for rows in lines], [name for name in lines[0] if name != "full"])


def against(paths: Iterable[Path], originals: Iterable[Path]) -> None:
    """Prints how far answers are from full attention of the original model, on the same questions."""
    full = {line["id"]: line["rows"]["full"] for line in read_lines(originals)}
    found = ((line["chunks"], (line["rows"], full.get(line["id"]))) for line in read_lines(paths))
    for chunks, pairs in _by_chunks(each for each in found if each[1][1] is not None):
        print(f"{chunks} chunks, {len(pairs)} questions")
        _print_differences(pairs, pairs[0][0])


def _print_differences(pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]], names: Iterable[str]) -> None:
    for name in names:
        points = [100 * (rows[name]["accuracy"] - base["accuracy"]) for rows, base in pairs]
        nats = [rows[name]["logprob"] - base["logprob"] for rows, base in pairs if base["logprob"] is not None]
        print(f"  {name}: {estimate(points)} points, {estimate(nats)} nats")


def _by_chunks(numbered: Iterable[tuple[int, Any]]) -> list[tuple[str, list[Any]]]:
    """Items by their number of chunks, in order, and all of them."""
    groups = defaultdict(list)
    for chunks, item in numbered:
        groups[chunks].append(item)
    everything = [item for items in groups.values() for item in items]
    return [*((str(chunks), items) for chunks, items in sorted(groups.items())), ("all", everything)]


def estimate(values: Sequence[float]) -> str:
    """The mean with its 95 % interval."""
    low, high = interval(values, 0.95)
    return f"{sum(values) / len(values):+.2f} ({low:+.2f} to {high:+.2f})"


def read_lines(paths: Iterable[Path]) -> Iterator[dict[str, Any]]:
    """The records of JSONL files."""
    for path in paths:
        yield from map(json.loads, path.read_text().splitlines())


def _part(text: str) -> slice:
    number, _, parts = text.partition("/")
    if not 1 <= int(number) <= int(parts):
        raise ValueError(text)
    return slice(int(number) - 1, None, int(parts))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("model", nargs="?", type=Path, help="folder of the model")
    parser.add_argument("output", nargs="?", type=Path, help="file of results, a line for each question")
    parser.add_argument("--limit", type=int, default=400, help="questions for each number of chunks (default: 400)")
    part = "the K-th of N parts of the questions, one for each core (default: 1/1)"
    parser.add_argument("--part", type=_part, default="1/1", metavar="K/N", help=part)
    ways = ("full", "offset", "shared", "parallel", "isolated")
    parser.add_argument("--contexts", nargs="+", choices=ways, default=CONTEXTS, help="contexts (default: full offset)")
    parser.add_argument("--max-tokens", type=int, default=32, help="longest answer (default: 32)")
    parser.add_argument("--threads", type=int, default=2, help="threads (default: 2)")
    parser.add_argument("--table", type=Path, nargs="+", metavar="FILE", help="print the table of these results")
    original = "with --table: results of the original model"
    parser.add_argument("--against", type=Path, nargs="+", metavar="FILE", help=original)
    args = parser.parse_args()
    if args.table:
        against(args.table, args.against) if args.against else table(args.table)
        return
    torch.set_num_threads(args.threads)
    measure(args.model, args.output, args.limit, args.part, args.contexts, args.max_tokens)


if __name__ == "__main__":
    main()
