# SPDX-License-Identifier: Apache-2.0
"""The demo's questions: the same every time, held out, with answers that their documents tell."""

import random
import re
from collections import Counter

from measuring.quality.questions.demo import demo_questions
from measuring.quality.questions.demo_episodes import Shape, make_episode
from measuring.quality.questions.demo_language import UNKNOWN, split_of
from measuring.quality.questions.plain_english import CHUNKS

QUESTIONS = demo_questions(60, numbers=CHUNKS)


def test_so_many_for_each_number_of_chunks_in_other_orders() -> None:
    assert Counter(len(question.chunks) for question in QUESTIONS) == dict.fromkeys(CHUNKS, 60)
    assert len({question.id for question in QUESTIONS}) == len(QUESTIONS)
    assert demo_questions(60, numbers=CHUNKS) == QUESTIONS
    assert demo_questions(7, numbers=CHUNKS) == [question for i, question in enumerate(QUESTIONS) if i % 60 < 7]
    sixteen = [question.chunks for question in QUESTIONS if len(question.chunks) == 16][:5]
    assert len({frozenset(chunks) for chunks in sixteen}) == 1
    assert len(set(sixteen)) == 5


def test_answers_are_told_and_names_are_held_out() -> None:
    answerable = [question for question in QUESTIONS if question.answers]
    assert 0.65 < len(answerable) / len(QUESTIONS) < 0.9
    for question in answerable:
        value, sentence = question.answers
        assert any(value in chunk.text for chunk in question.chunks)
        entity = re.fullmatch(rf"The .* of (.*) is {re.escape(value)}\.", sentence)[1]
        assert {split_of(name) for name in entity.split()} == {"heldout"}


def test_an_episode_is_a_function_of_the_generator_within_its_shape() -> None:
    shape = Shape(chunks=6, questions=12)
    one, same, other = (make_episode(random.Random(seed), "train", shape) for seed in (3, 3, 4))
    assert one == same != other
    for question in one.questions:
        assert question.value is not None or question.answer == UNKNOWN
    plain = Shape(chunks=3, questions=9, facts=(2, 2), unknown=0.0, extras=False)
    episode = make_episode(random.Random(5), "train", plain)
    assert len(episode.documents) == 3
    assert len(episode.questions) == 6  # at most as many as facts
    assert all(question.value for question in episode.questions)
    assert all(document.title is None for document in episode.documents)
