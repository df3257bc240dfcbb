# SPDX-License-Identifier: Apache-2.0
"""The demo's questions behind documents that were cut through; ``python -m evaluation.cut FILE`` writes a file of them.

Splitters that go by length cut sentences in two. A piece that was computed alone lacks what the sentence began with, so
these questions show what isolation costs a model, where the demo's own, with a whole document in each chunk, don't.
"""

import json
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from app.documents.document import Document
from evaluation.demo import demo_questions
from evaluation.questions import Question
from tools.progress import say

COUNT = 250
"""Questions for each number of chunks."""


def cut_questions(count: int) -> Iterator[Question]:
    """The demo's questions, from half of the documents, each in two pieces: as many chunks as the demo's.

    A document with the answer is cut within the sentence that has it, before the answer, others between any two words.
    Pieces follow one another.
    """
    for question in demo_questions(count):
        rng = random.Random(question.id)
        value = question.answers[0] if question.answers else None
        documents = _half(rng, question.chunks, value)
        pieces = tuple(piece for document in documents for piece in _cut(rng, document, value))
        yield replace(question, chunks=pieces)


def _half(rng: random.Random, documents: Sequence[Document], value: str | None) -> list[Document]:
    """Half of the documents, in their order, those with the answer among them."""
    indices = sorted(
        range(len(documents)), key=lambda i: (value is None or value not in documents[i].text, rng.random())
    )
    return [documents[i] for i in sorted(indices[: len(documents) // 2])]


def _cut(rng: random.Random, document: Document, value: str | None) -> tuple[Document, Document]:
    words = document.text.split()
    first, last = 1, len(words) - 1
    if value is not None and value in document.text:
        before, _, _ = document.text.partition(value)
        last = len(before.split())
        first = last - len(before.rpartition(". ")[2].split()) + 1
    place = rng.randint(first, last)
    return replace(document, text=" ".join(words[:place])), Document(" ".join(words[place:]))


def _record(question: Question) -> dict[str, object]:
    chunks = [{"title": each.title, "text": each.text} if each.title else each.text for each in question.chunks]
    fields = {"id": question.id, "system": question.system, "chunks": chunks}
    return {**fields, "question": question.question, "answers": question.answers}


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 1 or arguments[0].startswith("-"):
        say("usage: python -m evaluation.cut FILE")
        return 2
    lines = [json.dumps(_record(question)) for question in cut_questions(COUNT)]
    Path(arguments[0]).write_text("\n".join(lines) + "\n")
    say(f"{len(lines)} questions are in {arguments[0]}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
