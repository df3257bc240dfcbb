# SPDX-License-Identifier: Apache-2.0
"""The demo model's language: invented people, projects, places and products, and facts about them.

Names are composed of syllables and values are drawn at random, so that the model can't memorise a fact and must read
it. Each name belongs to one split permanently (`split_of`): names in held-out questions and answers never occur in
training text.
"""

import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

Split = Literal["train", "heldout"]

UNKNOWN = "I don't know."
DEFAULT_SYSTEM = "Answer from the documents."
SYSTEM_PROMPTS = (
    DEFAULT_SYSTEM,
    "You are a helpful assistant.",
    "Use only the documents below. If they do not have the answer, say that you don't know.",
    "Answer the question briefly.",
    "You answer questions about the company's records.",
    "Read the documents and answer.",
)

_ONSETS = "b c d f g h j k l m n p r s t v w z br dr gr kr st th sh".split()
_VOWELS = "aeiou"
_INNER_CODAS = ("", "", "", "", "l", "n", "r", "s")
_LAST_CODAS = ("", "", "", "l", "n", "r", "s", "x", "m", "k", "t")


def split_of(name: str) -> Split:
    """The split of a name; one name in eight is held out."""
    return "heldout" if zlib.crc32(name.encode()) % 8 == 0 else "train"


class Words:
    """Draws names and values of one split."""

    def __init__(self, rng: random.Random, split: Split) -> None:
        self._rng = rng
        self._split = split

    def name(self) -> str:
        """An invented name of two or three syllables, e.g. ``Dravon``, ``Falcon`` or ``Otira``."""
        while True:
            syllables = self._rng.choice((2, 3))
            name = "".join(self._syllable(i == 0, i == syllables - 1) for i in range(syllables)).capitalize()
            if 4 <= len(name) <= 8 and split_of(name) == self._split:
                return name

    def _syllable(self, first: bool, last: bool) -> str:
        onset = "" if first and self._rng.random() < 0.1 else self._rng.choice(_ONSETS)
        return onset + self._rng.choice(_VOWELS) + self._rng.choice(_LAST_CODAS if last else _INNER_CODAS)

    def person(self) -> str:
        """A given name and a surname."""
        return f"{self.name()} {self.name()}"

    def number(self, digits: int) -> str:
        """A number with a fixed number of digits."""
        return str(self._rng.randrange(10 ** (digits - 1), 10**digits))

    def year(self) -> str:
        return str(self._rng.randrange(1850, 2030))

    def date(self) -> str:
        return f"{self._rng.choice(_MONTHS)} {self._rng.randrange(1, 29)}"

    def one_of(self, choices: Sequence[str]) -> str:
        return self._rng.choice(choices)

    def amount(self, unit: str) -> str:
        return f"{self.number(self._rng.choice((2, 3, 4)))} {unit}"


_MONTHS = "January February March April May June July August September October November December".split()
_COLORS = "red blue green yellow black white purple orange brown gray silver golden pink".split()
_JOBS = "baker pilot teacher painter nurse lawyer farmer tailor sailor dentist plumber writer singer chemist".split()
_STATES = "planned running finished paused cancelled delayed approved".split()
_MATERIALS = "oak steel glass copper wool leather paper marble plastic bamboo".split()

Value = Callable[[Words], str]


def _number(digits: int) -> Value:
    return lambda words: words.number(digits)


def _amount(unit: str) -> Value:
    return lambda words: words.amount(unit)


def _one_of(choices: Sequence[str]) -> Value:
    return lambda words: words.one_of(choices)


ATTRIBUTES: dict[str, dict[str, Value]] = {
    "person": {
        "job": _one_of(_JOBS),
        "birth year": Words.year,
        "home town": Words.name,
        "phone number": _number(6),
        "favorite color": _one_of(_COLORS),
        "employer": Words.name,
        "badge number": _number(4),
        "best friend": Words.person,
    },
    "project": {
        "access code": _number(4),
        "owner": Words.person,
        "budget": _amount("euros"),
        "deadline": Words.date,
        "status": _one_of(_STATES),
        "main site": Words.name,
        "room number": _number(3),
        "code name": Words.name,
    },
    "place": {
        "population": _number(5),
        "mayor": Words.person,
        "river": Words.name,
        "founding year": Words.year,
        "postal code": _number(5),
        "highest hill": Words.name,
        "market day": Words.date,
        "area": _amount("hectares"),
    },
    "product": {
        "price": _amount("dollars"),
        "maker": Words.name,
        "weight": _amount("grams"),
        "color": _one_of(_COLORS),
        "serial number": _number(6),
        "material": _one_of(_MATERIALS),
        "designer": Words.person,
        "release date": Words.date,
    },
}
KINDS = tuple(ATTRIBUTES)


@dataclass(frozen=True, slots=True)
class Fact:
    """The fact that `entity`'s `attribute` is `value`."""

    entity: str
    attribute: str
    value: str


# The first phrasings are the easy ones: an answer's words precede the value, in the same order.
STATEMENTS = (
    "The {a} of {e} is {v}.",
    "We know that the {a} of {e} is {v}.",
    "On file the {a} of {e} is {v}.",
    "Since last year the {a} of {e} is {v}.",
    "{e}'s {a} is {v}.",
)
QUESTIONS = (
    "What is the {a} of {e}?",
    "Tell me the {a} of {e}.",
    "Do you know the {a} of {e}?",
    "I need the {a} of {e}.",
    "What is {e}'s {a}?",
    "Do you know {e}'s {a}?",
)
# The other phrasings swap attribute and entity, which a model of this size learns poorly: the last stage and the
# evaluation omit them.
PLAIN_STATEMENTS, PLAIN_QUESTIONS = 4, 4
ANSWER = "The {a} of {e} is {v}."
FILLERS = (
    "This was checked last week.",
    "More is in the archive.",
    "Nothing else is on record.",
    "The note was filed by the office.",
    "Please keep this page up to date.",
)


def tell(template: str, fact: Fact) -> str:
    """Fills a template with a fact."""
    return template.format(a=fact.attribute, e=fact.entity, v=fact.value)
