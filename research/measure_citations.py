# SPDX-License-Identifier: Apache-2.0
"""Measures citations on a running server: whether the right passages have the largest lifts, and what they cost.

    tessera serve qwen2.5-coder-1.5b
    python research/measure_citations.py --limit 50 --chunks 8 --server URL

The questions are those of ``tessera eval`` that one or two passages answer. Right answers alone are counted. Beside it,
``--asked`` numbers the passages, and asks the model itself to name those that its answer rests on.
"""

import argparse
import json
import random
import re
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from machine.http_client import http_client
from measuring.quality.metrics import score
from measuring.quality.questions.generated import generated
from measuring.quality.questions.plain_english import written
from measuring.quality.questions.questions import Question


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int, default=50, help="questions for each number of chunks (default: 50)")
    parser.add_argument("--chunks", type=int, nargs="+", default=[8], help="numbers of chunks (default: 8)")
    parser.add_argument("--server", default="http://127.0.0.1:8000")
    parser.add_argument("--asked", action="store_true", help="ask the model to cite, too")
    args = parser.parse_args()
    counts, costs = Counter[tuple[str, int, str, str]](), list[float]()
    with http_client(args.server, timeout=None) as client:
        for question, passages in _questions(args.limit, args.chunks):
            texts = [chunk.text for chunk in question.chunks]
            right = {number for number, each in enumerate(texts) if each in passages}
            kind = "two passages" if len(right) > 1 else "one passage"
            for by in ("attention", "asked") if args.asked else ("attention",):
                body = _body(question) if by == "attention" else _asking(question)
                answer = client.post("/v1/rag/chat", json=body).raise_for_status().json()
                text, report = answer["choices"][0]["message"]["content"], answer["cache"]
                case = by, len(texts), kind
                counts[*case, "questions"] += 1
                if not score(text, question.answers).accuracy:
                    continue
                cited = _ranked(report) if by == "attention" else _named(text)
                counts[*case, "right answers"] += 1
                counts[*case, "right passages first"] += right <= set(cited[: 1 if len(right) == 1 else 3])
                counts[*case, "one of them first"] += bool(cited) and cited[0] in right
                counts[*case, "none cited"] += not cited
                if by == "attention":
                    costs.append(report["timings_ms"]["cite"])
                said = {"by": by, "question": question.id, "answer": text, "right": sorted(right), "cited": cited}
                print(json.dumps(said), flush=True)
    for (by, number, kind, what), count in sorted(counts.items()):
        print(f"{by}, {number} chunks, {kind}, {what}: {count}")
    print(f"median time for the citations of an answer: {statistics.median(costs):.0f} ms")


def _questions(limit: int, numbers: Sequence[int]) -> Iterator[tuple[Question, tuple[str, ...]]]:
    """Questions behind each number of chunks, and the passages that have their answers."""
    asked = [
        (library, each)
        for library in (written(), generated())
        for each in library.questions
        if each.kind not in ("count", "unanswerable")
    ]
    for library, each in random.Random("citations").sample(asked, limit):
        for number in numbers:
            yield library.ask(each, number, long=False), each.passages


def _body(question: Question) -> dict[str, Any]:
    return {
        "system": question.system,
        "chunks": [chunk.text for chunk in question.chunks],
        "question": question.question,
        "max_tokens": 48,
        "temperature": 0,
        "cache": {"cite": True},
    }


def _asking(question: Question) -> dict[str, Any]:
    """The question behind numbered passages, with the wish for their numbers."""
    numbered = [f"[{number}] {chunk.text}" for number, chunk in enumerate(question.chunks, 1)]
    wish = "Behind the answer name the passages that it rests on by their numbers, such as [1] or [1][2]."
    return {**_body(question), "chunks": numbered, "question": f"{question.question} {wish}", "cache": {}}


def _named(text: str) -> list[int]:
    """Chunks in the order in which an answer names their numbers."""
    return list(dict.fromkeys(int(number) - 1 for number in re.findall(r"\[(\d{1,2})\]", text)))


def _ranked(report: dict[str, Any]) -> list[int]:
    """Chunks by their largest lift in any sentence."""
    lifts = Counter[int]()
    for citation in report["citations"]:
        for each in citation["chunks"]:
            lifts[each["chunk"]] = max(lifts[each["chunk"]], each["lift"])
    return [number for number, _ in lifts.most_common()]


if __name__ == "__main__":
    main()
