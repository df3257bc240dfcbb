# SPDX-License-Identifier: Apache-2.0
"""Names and facts: deterministic by seed; held-out names never occur in training."""

import random

from measuring.quality.questions.demo_episodes import Shape, make_episode
from measuring.quality.questions.demo_language import ATTRIBUTES, UNKNOWN, Words, split_of

SHAPE = Shape(chunks=6, questions=12)


def test_a_name_belongs_to_the_split_that_it_was_drawn_for() -> None:
    for split in ("train", "heldout"):
        words = Words(random.Random(1), split)
        assert {split_of(words.name()) for _ in range(200)} == {split}


def test_values_are_of_the_split_too() -> None:
    words = Words(random.Random(2), "heldout")
    names = [value(words) for kind in ATTRIBUTES.values() for value in kind.values() if value is Words.name]
    assert names
    assert all(split_of(name) == "heldout" for name in names)


def test_an_episode_is_a_function_of_the_generator() -> None:
    one, same, other = (make_episode(random.Random(seed), "train", SHAPE) for seed in (3, 3, 4))
    assert one == same != other


def test_known_answers_stand_in_a_document() -> None:
    for seed in range(50):
        episode = make_episode(random.Random(seed), "heldout", SHAPE)
        texts = [document.text for document in episode.documents]
        for question in episode.questions:
            if question.value is None:
                assert question.answer == UNKNOWN
            else:
                assert any(question.value in text for text in texts)
                assert question.answer.endswith(f" is {question.value}.")


def test_shape_bounds_what_is_drawn() -> None:
    plain = Shape(chunks=3, questions=9, facts=(2, 2), unknown=0.0, extras=False)
    episode = make_episode(random.Random(5), "train", plain)
    assert len(episode.documents) == 3
    assert len(episode.questions) == 6  # at most as many as facts
    assert all(question.value for question in episode.questions)
    assert all(document.title is None for document in episode.documents)
