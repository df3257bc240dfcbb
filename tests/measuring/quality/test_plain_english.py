# SPDX-License-Identifier: Apache-2.0
"""The questions in plain English are what they are said to be."""

import re
from collections import Counter

import pytest

from measuring.quality.metrics import contains, normalize
from measuring.quality.questions.plain_english import CHUNKS, _topics, plain_questions

TOPICS = _topics()
ASKED = [(topic, asked) for topic, each in TOPICS.items() for asked in each.questions]
PRONOUNS = re.compile(
    r"\b(it|its|she|her|hers|he|his|him|they|their|them|this|that|these|those|there|both|one|which|here)\b", re.I
)


def passages(topic: str, asked) -> list[str]:
    return [TOPICS[topic].passages[i] for i in asked.passages]


def sentence_with(passage: str, answer: str) -> tuple[int, str]:
    """The first sentence with the answer, and its place."""
    sentences = re.split(r"(?<=[.!?]) ", passage)
    return next((i, sentence) for i, sentence in enumerate(sentences) if contains(sentence, [answer]))


def test_there_are_enough_of_each_kind():
    texts = [passage for topic in TOPICS.values() for passage in topic.passages]
    assert len(texts) == len(set(texts)) >= 150
    kinds = Counter(asked.kind for _, asked in ASKED)
    assert sum(kinds.values()) >= 450
    assert kinds["refers-back"] >= 100
    assert kinds["two-chunk"] >= 80
    assert kinds["unanswerable"] >= 60
    assert len({asked.question for _, asked in ASKED}) == len(ASKED)


@pytest.mark.parametrize(("topic", "asked"), ASKED, ids=lambda value: getattr(value, "name", value))
def test_an_answer_stands_where_it_should(topic, asked):
    *before, last = passages(topic, asked)
    assert asked.question.endswith("?")
    assert len(before) == (asked.kind == "two-chunk")
    assert bool(asked.answers) == (asked.kind != "unanswerable")
    for answer in asked.answers:
        assert 1 <= len(answer.split()) <= 5
        assert normalize(answer) not in ("", "yes", "no")
        assert not contains(asked.question, [answer])
        assert not any(contains(passage, [answer]) for passage in before)
    if asked.answers:
        place, sentence = sentence_with(last, asked.answers[0])
        if asked.kind == "refers-back":
            assert place > 0
            assert PRONOUNS.search(sentence)


@pytest.mark.parametrize("long", [False, True])
def test_each_question_stands_behind_each_number_of_chunks(long):
    questions = plain_questions(1000, long=long)
    assert questions == plain_questions(1000, long=long)
    assert len({question.id for question in questions}) == len(questions) == len(CHUNKS) * len(ASKED)
    by_name = {asked.name: (topic, asked) for topic, asked in ASKED}
    for question in questions:
        kind, name, number = question.id.split("/")
        topic, asked = by_name[name]
        texts = [chunk.text for chunk in question.chunks]
        assert len(texts) == len(set(texts)) == int(number)
        wanted = {next(i for i, text in enumerate(texts) if passage in text) for passage in passages(topic, asked)}
        assert len(wanted) == (2 if kind == "two-chunk" else 1)  # in chunks of their own
        assert all(len(text.split()) > 200 for text in texts) == long


def test_the_first_few_are_of_several_kinds_and_topics():
    few = plain_questions(60)
    assert len(few) == 60 * len(CHUNKS)
    assert len({question.id.split("/")[0] for question in few}) == 4
