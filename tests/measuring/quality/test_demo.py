# SPDX-License-Identifier: Apache-2.0
"""The demo's questions: the same every time, held out, with answers that their documents tell."""

import re
from collections import Counter

from measuring.quality.questions.demo import CHUNKS, demo_questions
from measuring.quality.questions.demo_language import split_of

QUESTIONS = demo_questions(60)


def test_so_many_for_each_number_of_chunks() -> None:
    assert Counter(len(question.chunks) for question in QUESTIONS) == dict.fromkeys(CHUNKS, 60)
    assert len({question.id for question in QUESTIONS}) == len(QUESTIONS)
    assert demo_questions(60) == QUESTIONS
    assert demo_questions(7) == [question for i, question in enumerate(QUESTIONS) if i % 60 < 7]


def test_some_questions_have_no_answer() -> None:
    unanswerable = sum(not question.answers for question in QUESTIONS)
    assert 0.1 < unanswerable / len(QUESTIONS) < 0.35


def test_documents_stand_in_another_order_for_each_question() -> None:
    sixteen = [question.chunks for question in QUESTIONS if len(question.chunks) == 16][:5]
    assert len({frozenset(chunks) for chunks in sixteen}) == 1
    assert len(set(sixteen)) == 5


def test_answers_are_told_and_names_are_held_out() -> None:
    for question in QUESTIONS:
        if question.answers:
            value, sentence = question.answers
            assert any(value in chunk.text for chunk in question.chunks)
            entity = re.fullmatch(rf"The .* of (.*) is {re.escape(value)}\.", sentence)[1]
            assert {split_of(name) for name in entity.split()} == {"heldout"}
