# SPDX-License-Identifier: Apache-2.0
"""Scores of one answer.

Exact match and token F1 are SQuAD's (Rajpurkar et al. 2016, arXiv 1606.05250), with the rule of its second version
for questions without an answer (Rajpurkar et al. 2018, arXiv 1806.03822): what counts there is that the model says so.
Words are what white space separates; for languages written without it, F1 is no more than exact match.
"""

import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

REFUSAL = "I don't know"

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores of one answer, each from 0 to 1."""

    accuracy: float
    """1 if a right answer occurs in it (:func:`contains`), since models answer in sentences."""
    exact_match: float
    f1: float
    is_refusal: bool


def score(prediction: str, answers: Sequence[str], refusal: str = REFUSAL) -> Scores:
    """Scores of ``prediction``; without ``answers``, all are 1 for a refusal, else 0."""
    refused = is_refusal(prediction, refusal)
    if not answers:
        return Scores(float(refused), float(refused), float(refused), refused)
    accuracy = float(contains(prediction, answers))
    return Scores(accuracy, float(exact_match(prediction, answers)), token_f1(prediction, answers), refused)


def normalize(text: str) -> str:
    """SQuAD's: lower case, without ASCII punctuation and English articles, one space between words."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str, answers: Sequence[str]) -> bool:
    """Whether the prediction is one of the answers, both normalized."""
    return any(_words(prediction) == _words(answer) for answer in answers)


def token_f1(prediction: str, answers: Sequence[str]) -> float:
    """Largest harmonic mean of the words' precision and recall over the answers."""
    return max(_f1(_words(prediction), _words(answer)) for answer in answers)


def contains(prediction: str, answers: Sequence[str]) -> bool:
    """Whether one of the answers occurs in the prediction as whole words, both normalized.

    It is generous: "no" occurs in "There is no such person".
    """
    return any(_occurs(answer, prediction) for answer in answers)


def is_refusal(prediction: str, phrase: str = REFUSAL) -> bool:
    """Whether ``phrase`` occurs in the prediction as whole words, both normalized."""
    return _occurs(phrase, prediction)


def _words(text: str) -> list[str]:
    """Normalized words; if normalization leaves none, as of "A", the original ones."""
    return normalize(text).split() or text.lower().split()


def _f1(prediction: list[str], answer: list[str]) -> float:
    common = sum((Counter(prediction) & Counter(answer)).values())
    return 2 * common / (len(prediction) + len(answer)) if common else 0.0


def _occurs(phrase: str, text: str) -> bool:
    return f" {_plain(phrase)} " in f" {_plain(text)} "


def _plain(text: str) -> str:
    # SQuAD's punctuation is ASCII only, and models write "don’t".
    return " ".join(_words(text.replace("’", "'")))
