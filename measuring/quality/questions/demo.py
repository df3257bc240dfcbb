# SPDX-License-Identifier: Apache-2.0
"""Questions for the demo model, about names that its training never showed."""

import random
from collections.abc import Iterator, Sequence

from measuring.quality.questions.demo_episodes import Episode, Shape, make_episode
from measuring.quality.questions.demo_language import PLAIN_QUESTIONS, PLAIN_STATEMENTS
from measuring.quality.questions.questions import Question

_QUESTIONS_PER_EPISODE = 5


def demo_questions(count: int, *, numbers: Sequence[int]) -> list[Question]:
    """``count`` questions for each of these ``numbers`` of chunks; always the same ones.

    Five questions share a set of documents, each with the documents in another order. About one question in five has
    no answer in them.
    """
    return [question for chunks in numbers for question in _questions(chunks, count)]


def _shape(chunks: int) -> Shape:
    """Shape of episodes in the last stage of training."""
    return Shape(chunks, _QUESTIONS_PER_EPISODE, statements=PLAIN_STATEMENTS, phrasings=PLAIN_QUESTIONS)


def _questions(chunks: int, count: int) -> Iterator[Question]:
    rng = random.Random(f"evaluation {chunks}")
    number = 0
    while True:
        for question in _of_episode(rng, make_episode(rng, "heldout", _shape(chunks)), number):
            if number == count:
                return
            number += 1
            yield question


def _of_episode(rng: random.Random, episode: Episode, number: int) -> Iterator[Question]:
    documents = list(episode.documents)
    for i, asked in enumerate(episode.questions, start=number):
        rng.shuffle(documents)
        answers = () if asked.value is None else (asked.value, asked.answer)
        yield Question(f"{len(documents)}-{i}", episode.system, tuple(documents), asked.text, answers)
