# SPDX-License-Identifier: Apache-2.0
"""Passages, questions about some of them, and the chunks in which these stand among others."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from app.documents.document import Document
from measuring.quality.metrics import REFUSAL
from measuring.quality.questions.questions import Question

SYSTEM: Final = (
    "You answer questions about the documents below. Keep answers short. "
    f"If the documents do not say, answer: {REFUSAL}."
)
_MOST_COUNTED: Final = 6
_NUMBERS: Final = ("none", "one", "two", "three", "four", "five", "six")

Kind = Literal["plain", "refers-back", "two-hop", "chain", "comparison", "count", "paraphrased", "unanswerable"]


@dataclass(frozen=True, slots=True)
class Asked:
    """A question about ``passages``, which all stand in the prompt, and never beside ``apart``.

    Of kind ``count``, some of the passages stand there, as many as is the answer.
    """

    kind: Kind
    name: str
    topic: str
    question: str
    answers: tuple[str, ...]
    passages: tuple[str, ...]
    apart: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Library:
    """``topics`` have as many passages each."""

    topics: Mapping[str, Sequence[str]]
    questions: Sequence[Asked]

    def ask(self, asked: Asked, number: int, *, long: bool) -> Question:
        """The question behind ``number`` chunks: each a passage, or, if ``long``, a passage of each topic."""
        rng = random.Random(f"{asked.name} {number}")
        passages, apart, answers = asked.passages, asked.apart, asked.answers
        if asked.kind == "count":
            counted = rng.randint(1 if number == 2 else 2, min(number, _MOST_COUNTED))
            shuffled = rng.sample(passages, len(passages))
            passages, apart = tuple(shuffled[:counted]), tuple(shuffled[counted:])
            answers = (str(counted), _NUMBERS[counted])
        compose = self._long_chunks if long else self._short_chunks
        texts = compose(rng, asked.topic, passages, apart, number)
        chunks = tuple(map(Document, rng.sample(texts, number)))
        return Question(f"{asked.name}/{number}", SYSTEM, chunks, asked.question, answers, asked.kind)

    def _short_chunks(
        self, rng: random.Random, topic: str, passages: Sequence[str], apart: Sequence[str], number: int
    ) -> list[str]:
        """The passages among others, as many of their topic as of all others."""
        taken = {*passages, *apart}
        own = [text for text in self.topics[topic] if text not in taken]
        others = [text for name in self.topics if name != topic for text in self.topics[name] if text not in taken]
        missing = number - len(passages)
        return [*passages, *rng.sample(own, -(-missing // 2)), *rng.sample(others, missing // 2)]

    def _long_chunks(
        self, rng: random.Random, topic: str, passages: Sequence[str], apart: Sequence[str], number: int
    ) -> list[str]:
        """The passages' chunks among others."""
        together = list(zip(*self.topics.values(), strict=True))
        wanted = [each for each in together if not set(passages).isdisjoint(each)]
        others = [each for each in together if set(passages).union(apart).isdisjoint(each)]
        return ["\n\n".join(each) for each in (*wanted, *rng.sample(others, number - len(wanted)))]
