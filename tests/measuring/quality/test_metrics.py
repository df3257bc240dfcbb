# SPDX-License-Identifier: Apache-2.0
"""Scores against known cases and the official formula."""

import string
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from measuring.quality.metrics import Scores, contains, exact_match, is_refusal, normalize, score, token_f1

TEXTS = st.text(alphabet="ab theTHE.'-\n", max_size=30)


@pytest.mark.parametrize(
    ("prediction", "answers", "f1"),
    [
        ("the cat sat on mat", ["cat on the mat"], 6 / 7),  # precision 3/4, recall 3/3
        ("U.S.A. state-of-the-art", ["usa stateoftheart"], 1),
        ("", ["Riga"], 0),
        ("the", ["Riga"], 0),
        ("It is Riga.", ["Paris", "Riga", "is Riga"], 4 / 5),
        ("A", ["a"], 1),
        ("The The", ["The The"], 1),
    ],
)
def test_f1_by_hand(prediction, answers, f1):
    assert token_f1(prediction, answers) == pytest.approx(f1)


@pytest.mark.parametrize(
    ("prediction", "answers", "is_exact", "is_contained"),
    [
        ("The Riga!", ["riga"], True, True),
        ("It is in Riga.", ["Paris", "Riga"], False, True),
        ("Rigas", ["Riga"], False, False),
        ("His code is 17342", ["7342"], False, False),
        ("New York City", ["York New"], False, False),
        ("He met the King of Spain", ["king of the Spain"], False, True),
        ("", ["Riga"], False, False),
        ("Paris", ["A"], False, False),
        ("A", ["A"], True, True),
        ("O’Brien", ["O'Brien"], False, True),
    ],
)
def test_exact_match_and_contains_by_hand(prediction, answers, is_exact, is_contained):
    assert exact_match(prediction, answers) is is_exact
    assert contains(prediction, answers) is is_contained


def official_f1(prediction: str, answer: str) -> float:
    """SQuAD 2.0's official formula, for an answer with words when normalized."""

    def tokens(text: str) -> list[str]:
        text = "".join(character for character in text.lower() if character not in string.punctuation)
        return [word for word in text.split() if word not in ("a", "an", "the")]

    predicted, gold = tokens(prediction), tokens(answer)
    same = sum((Counter(predicted) & Counter(gold)).values())
    if not same:
        return 0.0
    precision, recall = same / len(predicted), same / len(gold)
    return 2 * precision * recall / (precision + recall)


@given(TEXTS, TEXTS.filter(normalize))
def test_f1_is_the_official_one(prediction, answer):
    assert token_f1(prediction, [answer]) == pytest.approx(official_f1(prediction, answer))


@given(TEXTS, st.lists(TEXTS.filter(str.strip), min_size=1, max_size=3))
def test_scores_agree_with_each_other(prediction, answers):
    scores = score(prediction, answers)
    assert 0 <= scores.f1 <= 1
    assert scores.exact_match <= scores.accuracy
    assert scores.exact_match <= scores.f1


@pytest.mark.parametrize(
    ("prediction", "phrase", "refused"),
    [
        ("Sorry, I don’t know that", "I don't know.", True),
        ("I DON'T KNOW", "I don't know", True),
        ("I don't know-how", "I don't know", False),
        ("We don't know", "I don't know", False),
        ("", "I don't know", False),
        ("It's unanswerable", "Unanswerable", True),
    ],
)
def test_refusals(prediction, phrase, refused):
    assert is_refusal(prediction, phrase) is refused


@pytest.mark.parametrize(
    ("prediction", "answers", "scores"),
    [
        ("I don't know.", [], Scores(1, 1, 1, True)),
        ("Riga", [], Scores(0, 0, 0, False)),
        ("I don't know.", ["Riga"], Scores(0, 0, 0, True)),
        ("In Riga", ["Riga"], Scores(1, 0, 2 / 3, False)),
    ],
)
def test_without_an_answer_a_refusal_is_right(prediction, answers, scores):
    assert score(prediction, answers) == scores
