# SPDX-License-Identifier: Apache-2.0
"""Known passages are found by their exact text, in their own namespace, in time in proportion to the prompt."""

import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.prompt.known import SHORTEST, KnownPassages

ONE = "The Milton Bridge is 320 meters long, and it carries two lanes."
TWO = "Les pièces à 2 € – « neuves » – sont gardées au musée, bien sûr."


def known(*passages, **options):
    made = KnownPassages(**options)
    made.add_all("mine", passages)
    return made


def texts(passages, text, namespace="mine"):
    return [text[start:end] for start, end in passages.find(namespace, text)]


def test_passages_are_found_wherever_they_stand():
    passages = known(ONE, f"\n{TWO}\n\n")
    for text, found in [
        (ONE, [ONE]),
        (f"x{TWO}y{ONE}{ONE}\n{TWO}", [TWO, ONE, ONE, TWO]),
        (f"été {ONE[:-1]} {TWO}", [TWO]),
        (ONE[1:], []),
        ("", []),
    ]:
        assert texts(passages, text) == found


def test_the_longest_passage_at_a_place_is_found():
    longer, other = f"{ONE} It is grey.", f"{ONE} It was red."
    passages = known(longer, ONE, other, f"{longer} And old.")
    assert texts(passages, f"{longer} And new. {ONE} {other}") == [longer, ONE, other]


def test_nothing_of_another_namespace_is_found():
    passages = known(ONE)
    passages.add("mine\0salt", TWO)
    for namespace in ("mine", "mine\0salt", "other", "min", ""):
        assert texts(passages, f"{ONE} {TWO}", namespace) == {"mine": [ONE], "mine\0salt": [TWO]}.get(namespace, [])


def test_short_passages_are_not_remembered():
    passages = known("x" * (SHORTEST - 1), f"{'y' * (SHORTEST - 1)}  \n")
    assert texts(passages, "x" * 100 + "y" * 100) == []


def test_the_passages_longest_unused_are_forgotten():
    numbered = [f"{number} {ONE}" for number in range(40)]
    passages = known(*numbered[:20], most_bytes=20 * (512 + len(numbered[-1])))
    assert texts(passages, numbered[0]) == [numbered[0]]  # used
    passages.add_all("mine", numbered[20:39])
    assert [texts(passages, each) == [each] for each in numbered] == [True, *[False] * 19, *[True] * 19, False]
    passages.add_all("other", numbered)
    assert texts(passages, numbered[0]) == []
    assert texts(passages, numbered[39], "other") == [numbered[39]]


@given(st.data())
def test_what_is_found_is_what_comparing_finds(data):
    letters = st.text(alphabet="ab é", min_size=SHORTEST, max_size=SHORTEST + 12)
    given_passages = [text.strip("\n").rstrip() for text in data.draw(st.lists(letters, max_size=5))]
    passages = [text for text in given_passages if len(text) >= SHORTEST]
    parts = st.lists(
        st.one_of(st.sampled_from([*passages, "a", " b"]), st.text(alphabet="ab é", max_size=40)), max_size=8
    )
    text = "".join(data.draw(parts))
    expected, at = [], 0
    while at < len(text):
        here = max((len(each) for each in passages if text.startswith(each, at)), default=0)
        if here:
            expected.append((at, at + here))
        at += here or 1
    assert known(*given_passages).find("mine", text) == expected


@pytest.mark.parametrize("kind", ["ordinary", "beginnings", "one letter"])
def test_the_time_grows_with_the_text_at_most(kind):
    words = random.Random(1)
    made = [" ".join(words.choices(["bridge", "mill", "long", "was", "founded"], k=30)) for _ in range(300)]
    passages = known(*made, *("a" * length + "b" for length in range(40, 400, 10)))
    units = {"ordinary": "the harbour is closed today ", "beginnings": made[0][:40], "one letter": "a"}

    def seconds(length):
        text = (units[kind] * (length // len(units[kind]) + 1))[:length]
        took = []
        for _ in range(3):
            started = time.process_time()
            passages.find("mine", text)
            took.append(time.process_time() - started)
        return min(took)

    seconds(100)
    assert seconds(160_000) < 16 * max(seconds(20_000), 0.0005)
