# SPDX-License-Identifier: Apache-2.0
"""Known passages are found by their exact text, in their own namespace, in time in proportion to the prompt."""

import random
from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.prompt.known import SHORTEST, KnownPassages
from tests.support.cpu_time import cpu_seconds

ONE = "The Milton Bridge is 320 meters long, and it carries two lanes."
TWO = "Les pièces à 2 € – « neuves » – sont gardées au musée, bien sûr."


def known(*passages, **options):
    made = KnownPassages(**options)
    made.add_all("mine", passages)
    return made


def texts(passages, text, namespace="mine"):
    return [text[start:end] for start, end in passages.find(namespace, text)]


def test_nothing_of_another_namespace_is_found():
    passages = known(ONE)
    passages.add("mine\0salt", TWO)
    for namespace in ("mine", "mine\0salt", "other", "min", ""):
        assert texts(passages, f"{ONE} {TWO}", namespace) == {"mine": [ONE], "mine\0salt": [TWO]}.get(namespace, [])


def test_whoever_has_most_forgets_first():
    """The salts of a namespace share its part."""
    mine, numbered = f"mine {ONE}", [f"{number:03} {ONE}" for number in range(200)]
    passages = known(mine, most_bytes=20 * (512 + len(numbered[-1])))
    for number, each in enumerate(numbered):
        passages.add(f"other\0salt {number}", each)
    assert texts(passages, mine) == [mine]
    assert texts(passages, numbered[199], "other\0salt 199") == [numbered[199]]
    assert texts(passages, numbered[0], "other\0salt 0") == []
    passages.add_all("mine", numbered)
    kept = [texts(passages, each, f"other\0salt {number}") == [each] for number, each in enumerate(numbered)]
    assert 9 <= sum(kept) <= 11, "each has half"


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 12), st.sampled_from(["", "b", "ba", "é"])), max_size=40),
    st.integers(2, 8),
)
def test_passages_that_begin_with_others_come_and_go(steps, most):
    size = 512 + SHORTEST + 16
    passages, held = known(most_bytes=most * size), OrderedDict()
    for is_added, length, end in steps:
        text = "a" * (SHORTEST + length) + end
        if is_added:
            held[text] = held.pop(text, 512 + len(text.encode()))
            while sum(held.values()) > most * size:
                held.popitem(last=False)
            passages.add("mine", text)
        else:
            prompt = f"{text}b"
            found = passages.find("mine", prompt)
            at_once = max((len(each) for each in held if prompt.startswith(each)), default=0)
            assert max((end for start, end in found if start == 0), default=0) == at_once
            for start, end in found:
                held.move_to_end(prompt[start:end])


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


WORDS = random.Random(1)
MADE = [" ".join(WORDS.choices(["bridge", "mill", "long", "was", "founded"], k=30)) for _ in range(300)]


@pytest.mark.parametrize(
    ("unit", "passages_for"),
    [
        ("the harbour is closed today ", lambda _: MADE),
        (MADE[0][:40], lambda _: MADE),
        ("a", lambda _: ["a" * length + "b" for length in range(40, 400, 10)]),
        ("a" * 39 + "b", lambda n: ["a" * length for length in range(40, 40 + n // 50)]),
        ("b" * 99, lambda n: ["b" * length + "a" for length in range(40, 40 + n // 50)]),
        ("a", lambda n: ["a" * (n // 2) + "b"]),
    ],
    ids=["ordinary", "beginnings", "one letter", "nested", "stairs", "one long"],
)
def test_the_time_grows_with_the_text_at_most(unit, passages_for):
    def seconds(length):
        passages, text = known(*passages_for(length)), unit * (length // len(unit))
        passages.find("mine", "new ones are added " * 9)
        return cpu_seconds(passages.find, "mine", text)

    assert seconds(160_000) < 16 * max(seconds(20_000), 0.0005)


@pytest.mark.parametrize("beginning", ["", "All these passages begin like this. "])
def test_another_passage_costs_the_same_however_many_there_are(beginning):
    def seconds(number):
        passages = known(*(f"{beginning}{ONE} {each}" for each in range(number)))
        passages.find("mine", ONE)

        def add_some():
            for each in range(50):
                passages.add("mine", f"{beginning}{each} of {number}: {ONE}")
                passages.find("mine", ONE)

        return cpu_seconds(add_some, tries=1)

    assert seconds(16_000) < 4 * max(seconds(1_000), 0.0005)


def test_forgotten_passages_cost_nothing():
    text = " ".join(f"word{number}" for number in range(20_000))
    fresh, used = known(ONE), known(most_bytes=20_000)
    for number in range(4_000):
        used.add("mine", f"{number} {ONE}")
        if number % 10 == 0:
            used.find("mine", ONE)
    assert texts(used, f"3999 {ONE}") == [f"3999 {ONE}"]
    fresh.find("mine", text)
    took, took_fresh = (cpu_seconds(each.find, "mine", text, tries=30) for each in (used, fresh))
    assert took < 4 * max(took_fresh, 0.0005)
