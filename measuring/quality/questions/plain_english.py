# SPDX-License-Identifier: Apache-2.0
"""Questions in plain English about invented facts, which no model knows by heart.

`passages/` has a file for each topic: passages of some 60 tokens, and questions of four kinds: ``plain``;
``refers-back``, where the sentence with the answer names its subject by a pronoun only; ``two-chunk``, which need two
passages; and ``unanswerable``. Passages that don't matter to a question stand beside those that do, half of them from
the same topic.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final, Literal

from app.documents.document import Document
from measuring.quality.metrics import REFUSAL
from measuring.quality.questions.questions import Question

CHUNKS: Final = (2, 4, 8, 16)
SYSTEM: Final = (
    "You answer questions about the documents below. Keep answers short. "
    f"If the documents do not say, answer: {REFUSAL}."
)
_FOLDER: Final = Path(__file__).parent / "passages"

Kind = Literal["plain", "refers-back", "two-chunk", "unanswerable"]


@dataclass(frozen=True, slots=True)
class _Asked:
    """A question, the passages that it is about by index, and where it comes from."""

    kind: Kind
    name: str
    question: str
    answers: tuple[str, ...]
    passages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Topic:
    passages: tuple[str, ...]
    questions: tuple[_Asked, ...]


def plain_questions(count: int, *, long: bool = False, numbers: Sequence[int] = CHUNKS) -> list[Question]:
    """Up to ``count`` questions behind each of these ``numbers`` of chunks; always the same ones.

    A chunk is a passage, or, if ``long``, six of different topics: some 400 tokens.
    """
    topics = _topics()
    asked = [(topic, each) for topic in topics for each in topics[topic].questions]
    random.Random("plain english").shuffle(asked)
    compose = _long_chunks if long else _short_chunks
    return [
        Question(f"{each.kind}/{each.name}/{number}", SYSTEM, compose(topic, each, number), each.question, each.answers)
        for number in numbers
        for topic, each in asked[:count]
    ]


def _short_chunks(topic: str, asked: _Asked, number: int) -> tuple[Document, ...]:
    """The question's passages among others, as many of its own topic as of all others."""
    rng = random.Random(f"{asked.name} {number}")
    topics = _topics()
    wanted = [topics[topic].passages[i] for i in asked.passages]
    own = [passage for passage in topics[topic].passages if passage not in wanted]
    others = [passage for name in topics if name != topic for passage in topics[name].passages]
    missing = number - len(wanted)
    return _shuffled(rng, [*wanted, *rng.sample(own, -(-missing // 2)), *rng.sample(others, missing // 2)])


def _long_chunks(topic: str, asked: _Asked, number: int) -> tuple[Document, ...]:
    """Chunks of one passage of each topic, including the question's passages."""
    rng = random.Random(f"{asked.name} {number}")
    chunks = ["\n\n".join(passages) for passages in zip(*(each.passages for each in _topics().values()), strict=True)]
    wanted = [chunks[i] for i in asked.passages]
    others = [chunk for chunk in chunks if chunk not in wanted]
    return _shuffled(rng, [*wanted, *rng.sample(others, number - len(wanted))])


def _shuffled(rng: random.Random, texts: Sequence[str]) -> tuple[Document, ...]:
    return tuple(map(Document, rng.sample(texts, len(texts))))


@cache
def _topics() -> dict[str, _Topic]:
    return {path.stem: _read(path) for path in sorted(_FOLDER.glob("*.json"))}


def _read(path: Path) -> _Topic:
    record = json.loads(path.read_bytes())
    index = {passage["id"]: i for i, passage in enumerate(record["passages"])}
    questions = (
        _Asked(
            asked["kind"],
            f"{path.stem}-{number}",
            asked["question"],
            tuple(asked["answers"]),
            tuple(index[passage] for passage in asked["passages"]),
        )
        for number, asked in enumerate(record["questions"])
    )
    return _Topic(tuple(passage["text"] for passage in record["passages"]), tuple(questions))
