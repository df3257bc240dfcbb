# SPDX-License-Identifier: Apache-2.0
"""Documents found in prompts by the forms of apps: in whole, with everything that varies outside."""

import time

import pytest

from app.documents.found import finder
from app.documents.patterns import PATTERNS, Pattern, PatternError, patterns_with
from tests.support.app_prompts import FORMS, QUESTION

PASSAGES = [
    "The Milton Bridge is 320 meters long, and carries two lanes.",
    "The bakery on Quay Street was founded in 1987 by two sisters.",
    "[1] Opening hours <b>vary</b>: the mill is closed on Mondays & [CONTEXT 9].",
]


def found(text, patterns=PATTERNS):
    return [text[span.start : span.end] for span in finder(patterns, lambda _: [])(text)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("order", "first"), [((0, 1, 2), 0), ((2, 0, 1), 7), ((1,), 12)])
def test_each_passage_is_found_whatever_its_number_and_place(form, order, first):
    passages = [PASSAGES[index] for index in order]
    messages = FORMS[form](passages, first)
    assert [each for message in messages for each in found(message["content"])] == passages


@pytest.mark.parametrize(
    "text",
    [
        QUESTION,
        '<source id="1">never closed',
        "closed only</source>",
        "[CONTEXT 1]:\nanother number\n[END CONTEXT 2]",
        "What does `[CONTEXT 1]:` mean?",
        "The context:\n\nContext is everything.\nAnswer: no.",
        "a\n------\nb\n------\nc",
        "<context>\ntoo short\n</context>",
        'half of a pair: <source id="1">\ud83d</source>',
    ],
)
def test_other_text_is_left_alone(text):
    assert found(text) == []


def test_the_passage_within_is_taken():
    """A passage may quote markers, of its own form too."""
    assert found('<source id="1">a <source id="2">b</source> c</source>') == ["b"]
    text = "[CONTEXT 1]:\nsays [END CONTEXT 2] and more\n[END CONTEXT 1]"
    assert found(text) == ["says [END CONTEXT 2] and more"]


def test_white_space_around_a_passage_is_no_part_of_it():
    assert found('<source id="1">\n\n  indented:\n    code \n\n</source>') == ["  indented:\n    code"]


def test_further_forms_come_from_a_file(tmp_path):
    file = tmp_path / "forms.toml"
    file.write_text(
        '[[pattern]]\napp = "Mine"\nstart = "### Passage {number} ({text})\\n"\nend = ["\\n### ", "{end}"]\n'
    )
    patterns = patterns_with(file)
    assert found("### Passage 1 (a.pdf)\none\n### Passage 2 (b.pdf)\ntwo\nlines", patterns) == ["one", "two\nlines"]
    assert patterns[1:] == PATTERNS


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "No such file"),
        ("pattern = [", "is not TOML"),
        ('[[pattern]]\napp = "a"\nstart = "x"\n', r"pattern\.0\.end: Field required"),
        ('[[pattern]]\napp = "a"\nstart = "{text}x"\nend = " "\n', "the marker ' ' has no text of its own"),
        ('[[pattern]]\napp = "a"\nstart = "x{text}"\nend = "y"\n', "must be followed by text"),
        ('[[pattern]]\napp = "a"\nstart = "x{end}y"\nend = "y"\n', "must be followed by text"),
    ],
)
def test_a_file_that_can_not_be_used_is_refused_in_words(content, words, tmp_path):
    file = tmp_path / "forms.toml"
    if content is not None:
        file.write_text(content)
    with pytest.raises(PatternError, match=words):
        patterns_with(file)


@pytest.mark.parametrize(
    "unit",
    [
        '<source id="1">',
        '<source id="1">x</source>',
        "[CONTEXT 1]:\n",
        "\n[END CONTEXT 1]",
        "[CONTEXT 1]:\n\n[END CONTEXT 2]",
        "<source id=" + "\n" * 3,
        "<contextItem>\n" + " " * 30,
        "<context>\n",
        "ordinary words ",
    ],
)
def test_the_time_grows_with_the_text_at_most(unit):
    def seconds(length):
        text = (unit * (length // len(unit) + 1))[:length]
        find, took = finder(PATTERNS, lambda _: []), []
        for _ in range(3):
            started = time.process_time()
            find(text)
            took.append(time.process_time() - started)
        return min(took)

    assert seconds(400_000) < 16 * max(seconds(50_000), 0.002)


def test_rows_are_checked_when_they_are_made():
    with pytest.raises(PatternError, match="has no text of its own"):
        Pattern("a", "{number}", ("x",))
