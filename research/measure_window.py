#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measure answers from more documents than a model has positions for.

    .venv/bin/python -m research.demo_model.train --attention full --end 0.2 --positions 512 --work-dir RUN --out MODEL
    .venv/bin/python research/measure_window.py MODEL FOLDER

MODEL is a demo model trained for few positions in full attention. Writes its questions in three forms to FOLDER: over
all documents, over the first that fit, and over all in long chunks. Then runs `tessera eval` for each row of the table
in docs/quality.md ("Beyond the trained positions"). An interrupted run is resumed by the same command.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Final

from transformers import AutoTokenizer

from app.documents.document import Document
from measuring.quality.questions.demo import demo_questions
from measuring.quality.questions.questions import Question

DOCUMENTS: Final = 46
"""Of a question: four times as many tokens as positions."""
FITTING_TOKENS: Final = 430
"""Of chunks in 512 positions, beside the system prompt, the question and the answer."""
CHUNK_TOKENS: Final = 480
POSITIONS: Final = ("--max-model-len", "512")
WINDOW: Final = ("--max-model-len", "4096", "--chunk-mode", "window")
ROWS: Final = (
    ("fitting", "full,offset", POSITIONS),
    ("all", "window,shared", WINDOW),
    ("long-chunks", "window", WINDOW),
)
"""Question file, modes and the server's flags."""
Length = Callable[[str], int]


def groups(documents: Iterable[Document], tokens: int, length: Length) -> list[list[Document]]:
    """Documents in groups of at most ``tokens`` tokens, in their order."""
    found: list[list[Document]] = []
    used = 0
    for document in documents:
        size = length(document.render())
        if not found or used + size > tokens:
            found.append([])
            used = 0
        found[-1].append(document)
        used += size
    return found


def fitting(question: Question, length: Length) -> Question:
    return replace(question, chunks=tuple(groups(question.chunks, FITTING_TOKENS, length)[0]))


def in_long_chunks(question: Question, length: Length) -> Question:
    chunks = groups(question.chunks, CHUNK_TOKENS, length)
    return replace(question, chunks=tuple(Document("".join(each.render() for each in chunk)) for chunk in chunks))


def write(path: Path, questions: Sequence[Question]) -> None:
    chunks = [[{"title": each.title, "text": each.text} for each in question.chunks] for question in questions]
    records = [{**asdict(question), "chunks": each} for question, each in zip(questions, chunks, strict=True)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def main() -> None:
    summary, _, epilog = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, metavar="MODEL", help="folder of the model")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="of questions and results")
    parser.add_argument("--limit", type=int, default=300, help="questions (default: 300)")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)

    def length(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False)["input_ids"])

    questions = demo_questions(args.limit, numbers=(DOCUMENTS,))
    args.folder.mkdir(parents=True, exist_ok=True)
    write(args.folder / "all.jsonl", questions)
    write(args.folder / "fitting.jsonl", [fitting(each, length) for each in questions])
    write(args.folder / "long-chunks.jsonl", [in_long_chunks(each, length) for each in questions])
    for number, (name, modes, flags) in enumerate(ROWS):
        asked = ("--questions", args.folder / f"{name}.jsonl", "--modes", modes, "--max-tokens", "24")
        command = (sys.executable, "-m", "app.cli", "eval", args.model, *asked)
        done = subprocess.run([*command, "--output", args.folder / f"{number}-{name}", "--", *flags], check=False)
        if done.returncode:
            sys.exit(done.returncode)


if __name__ == "__main__":
    main()
