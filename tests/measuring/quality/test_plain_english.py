# SPDX-License-Identifier: Apache-2.0
"""The questions in plain English are what they are said to be."""

import re
from collections import Counter
from typing import get_args

import pytest

from measuring.quality.metrics import contains, normalize
from measuring.quality.questions.generated import generated
from measuring.quality.questions.library import Asked, Kind
from measuring.quality.questions.plain_english import CHUNKS, MOST_LONG_CHUNKS, plain_questions, written

WRITTEN, GENERATED = written(), generated()
ASKED = {asked.name: asked for library in (WRITTEN, GENERATED) for asked in library.questions}
PRONOUNS = re.compile(
    r"\b(it|its|she|her|hers|he|his|him|they|their|them|this|that|these|those|there|both|one|which|here)\b", re.I
)
FUNCTION_WORDS = re.compile(
    r"\b(a|an|the|of|in|on|at|to|with|is|are|was|did|do|does|has|have|had|what|which|who|when|where|how|many|large|kind|"
    r"most|that|it|its|all|for|and|one)\b"
)


def content(text: str) -> set[str]:
    """Words that mean something, without endings."""
    return {re.sub(r"(ing|ed|es|s)$", "", word) for word in FUNCTION_WORDS.sub(" ", normalize(text)).split()}


def is_named(passage: str, in_passage: str) -> bool:
    """Whether what the passage is about is named in the other one."""
    (name,) = re.findall(r"^(?:The )?(?:Hotel )?([A-Z]\w+(?: [A-Z]\w+)?)", passage)
    return name in in_passage


def of_kind(*kinds: str) -> list[Asked]:
    return [asked for asked in ASKED.values() if asked.kind in kinds]


def test_there_are_enough_of_each_kind():
    for library in (WRITTEN, GENERATED):
        texts = [passage for passages in library.topics.values() for passage in passages]
        assert len(texts) == len(set(texts)) >= 150
    kinds = Counter(asked.kind for asked in ASKED.values())
    assert set(kinds) == set(get_args(Kind))
    assert min(kinds.values()) >= 50
    assert len(ASKED) == len(WRITTEN.questions) + len(GENERATED.questions)
    assert {len(each) for each in generated.__wrapped__().topics.values()} == {40}
    assert generated.__wrapped__() == GENERATED  # the same in each run


@pytest.mark.parametrize("kind", get_args(Kind))
def test_an_answer_stands_where_it_should(kind):
    for asked in of_kind(kind):
        *before, last = asked.passages
        assert asked.question.endswith("?"), asked.name
        assert bool(asked.answers) == (kind not in ("unanswerable", "count")), asked.name
        assert len(before) == (kind in ("two-hop", "chain", "comparison")) or kind == "count", asked.name
        assert not asked.answers or contains(last, asked.answers), asked.name
        for answer in asked.answers:
            assert 1 <= len(answer.split()) <= 5, asked.name
            assert normalize(answer) not in ("", "yes", "no"), asked.name
            assert not any(contains(text, [answer]) for text in (asked.question, *before)), asked.name


def test_questions_are_of_their_kinds():
    for asked in of_kind("refers-back"):
        first, *others = re.split(r"(?<=[.!?]) ", asked.passages[0])
        assert not contains(first, asked.answers[:1]), asked.name
        sentence = next(sentence for sentence in others if contains(sentence, asked.answers[:1]))
        assert PRONOUNS.search(sentence), asked.name
    for asked in of_kind("chain", "paraphrased"):
        assert not content(asked.question) & content(asked.passages[-1]), asked.name
    for asked in of_kind("chain"):
        first, second = asked.passages
        assert is_named(second, first), asked.name
        assert not content(asked.question) <= content(first), asked.name
    for asked in of_kind("unanswerable"):
        assert all(is_named(passage, asked.passages[0]) for passage in asked.apart), asked.name
    by_question = Counter(asked.question for asked in GENERATED.questions if asked.kind == "paraphrased")
    assert set(by_question.values()) == {1}


def test_all_passages_that_count_are_known():
    """One that stands there by chance would count too."""
    for asked in of_kind("count"):
        counted = asked.name.split("-")[-2]
        texts = {text for passages in GENERATED.topics.values() for text in passages if contains(text, [counted])}
        assert len(asked.passages) == 8, asked.name
        assert set(asked.passages) == texts & set(GENERATED.topics[asked.topic]), asked.name
        assert asked.topic == "towns" or texts == set(asked.passages), asked.name


@pytest.mark.parametrize("long", [False, True])
def test_each_question_stands_behind_each_number_of_chunks(long):
    numbers = (*CHUNKS, MOST_LONG_CHUNKS if long else 32)
    questions = plain_questions(400, long=long, numbers=numbers)
    assert questions == plain_questions(400, long=long, numbers=numbers)
    assert len({question.id for question in questions}) == len(questions) == len(numbers) * 400
    assert Counter((each.kind, len(each.chunks)) for each in questions) == {
        (kind, number): 50 for kind in get_args(Kind) for number in numbers
    }
    for question in questions:
        name, _, number = question.id.rpartition("/")
        asked, texts = ASKED[name], [chunk.text for chunk in question.chunks]
        assert question.kind == name.split("/")[0]
        assert len(texts) == len(set(texts)) == int(number)
        holders = [[i for i, text in enumerate(texts) if passage in text] for passage in asked.passages]
        assert not any(passage in text for passage in asked.apart for text in texts)
        there = [held for held in holders if held]
        assert all(len(held) == 1 for held in there)
        assert len({held[0] for held in there}) == len(there)  # in chunks of their own
        assert len(there) == (int(question.answers[0]) if asked.kind == "count" else len(asked.passages))
        assert all(len(text.split()) > 100 for text in texts) == long


def test_the_first_few_are_of_all_kinds_and_numbers():
    assert {(each.kind, len(each.chunks)) for each in plain_questions(8)} == {
        (kind, number) for kind in get_args(Kind) for number in CHUNKS
    }
