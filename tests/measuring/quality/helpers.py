# SPDX-License-Identifier: Apache-2.0
"""Questions and results."""

import json
from pathlib import Path

from app.documents.document import Document
from measuring.quality.metrics import REFUSAL
from measuring.quality.questions.questions import Question
from measuring.quality.results import Result, RunSettings
from tests.measuring.fake_server import make_report


def make_question(id: str = "1", *chunks: str, answers: tuple[str, ...] = ("Riga",), **fields) -> Question:
    texts = tuple(Document(text) for text in chunks or ("Falcon is in Riga.",))
    given = {"system": "", "chunks": texts, "question": "Where is Falcon?", **fields}
    return Question(id=id, answers=answers, **given)


def write_questions(path: Path, count: int) -> Path:
    """Questions q0, q1, … in Tessera's format; the first chunk answers two thirds."""
    records = [
        {
            "id": f"q{i}",
            "chunks": [f"Town {i} is in Latvia."] * (i % 3 + 1),
            "question": "Where?",
            "answers": [] if i % 3 == 2 else ["Latvia"],
        }
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def make_result(mode: str = "full", question: str = "1", text: str = "In Riga.", **fields) -> Result:
    answered = {"ttft_s": 0.5, "total_s": 1.0, "cache": make_report(mode)}
    given = {"question": question, "mode": mode, "chunks": 1, "answers": ("Riga",), "text": text, **answered, **fields}
    return Result(**given)


def make_settings(**fields) -> RunSettings:
    settings = {"questions": "q.jsonl", "questions_sha256": "ab", "modes": ("full", "shared"), "refusal": REFUSAL}
    settings |= {"model": None, "server_arguments": (), "served_model": "m", "max_tokens": 64, "concurrency": 1}
    return RunSettings(**settings | {"tessera": "0.1.0", "vllm": "0.32.0"} | fields)
