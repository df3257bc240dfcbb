# SPDX-License-Identifier: Apache-2.0
"""Writes questions behind 64 chunks of some 400 tokens, for `tessera eval --questions`.

    python -m research.many_chunks questions.jsonl [--pages N] [--questions N]
    tessera eval MODEL --questions questions.jsonl --modes full,offset,offset%25~15% -- --max-model-len 32768

The passages and questions are the built-in ones of `tessera eval`. All questions of a page stand behind the same chunks
in the same order, so that vLLM's prefix cache answers most of them in full attention; a page's first question has it
all to compute.
"""

import argparse
import json
import random
from collections.abc import Iterator
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any, Final, get_args

from measuring.kit.arguments import positive
from measuring.quality.questions.generated import generated
from measuring.quality.questions.library import SYSTEM, Asked, Kind
from measuring.quality.questions.plain_english import written

CHUNKS: Final = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--pages", type=positive, default=3, help="orders of the chunks (default: 3)")
    parser.add_argument("--questions", type=positive, default=32, help="behind each page, of all kinds (default: 32)")
    args = parser.parse_args()
    records = [record for number in range(args.pages) for record in page(number, args.pages, args.questions)]
    args.output.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def page(number: int, pages: int, questions: int) -> Iterator[dict[str, Any]]:
    """The records of one of so many pages, which have no question in common."""
    rng = random.Random(f"many chunks {number}")
    libraries = written(), generated()
    rows = [row for library in libraries for row in zip(*library.topics.values(), strict=True)]
    chosen = rng.sample(rows, CHUNKS)
    present = set(chain(*chosen))
    every = [asked for library in libraries for asked in library.questions]
    by_kind = [islice(_of_kind(every, kind), number, None, pages) for kind in get_args(Kind)]
    fitting = (asked for asked in chain(*zip_longest(*by_kind)) if asked and _fits(asked, present))
    for asked in islice(fitting, questions):
        counted = len(present.intersection(asked.passages))
        yield {
            "id": f"{asked.name}/{CHUNKS}/{number}",
            "kind": asked.kind,
            "system": SYSTEM,
            "chunks": ["\n\n".join(row) for row in chosen],
            "question": asked.question,
            "answers": [str(counted)] if asked.kind == "count" else list(asked.answers),
        }


def _of_kind(every: list[Asked], kind: Kind) -> list[Asked]:
    of_kind = [asked for asked in every if asked.kind == kind]
    return random.Random(kind).sample(of_kind, len(of_kind))


def _fits(asked: Asked, present: set[str]) -> bool:
    is_there = asked.kind == "count" or present.issuperset(asked.passages)
    return is_there and present.isdisjoint(asked.apart)


if __name__ == "__main__":
    main()
