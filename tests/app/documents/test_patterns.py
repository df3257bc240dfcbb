# SPDX-License-Identifier: Apache-2.0
"""Documents found in prompts by the forms of apps: in whole, with everything that varies outside."""

import pytest

from app.documents.found import finder
from app.documents.patterns import PATTERNS, PatternError, patterns_of
from tests.support.app_prompts import FORMS, QUESTION
from tests.support.cpu_time import cpu_seconds

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
        *(QUESTION, '<source id="1">never closed', "closed only</source>", "<context>\ntoo short\n</context>"),
        *("[CONTEXT 1]:\nanother number\n[END CONTEXT 2]", "What does `[CONTEXT 1]:` mean?"),
        *("The context:\n\nContext is everything.\nAnswer: no.", "a\n------\nb\n------\nc"),
    ],
)
def test_other_text_is_left_alone(text):
    assert found(text) == []


def test_the_passage_within_is_taken_without_white_space_around():
    """A passage may quote markers, of its own form too."""
    assert found('<source id="1">a <source id="2">b</source> c</source>') == ["b"]
    text = "[CONTEXT 1]:\nsays [END CONTEXT 2] and more\n[END CONTEXT 1]"
    assert found(text) == ["says [END CONTEXT 2] and more"]
    assert found('<source id="1">\n\n  indented:\n    code \n\n</source>') == ["  indented:\n    code"]
    example = (  # of LlamaIndex's prompt for citations: it ends before its question
        "For example:\nSource 1:\nThe sky is red.\nSource 2:\nWater is wet when the sky is red.\n"
        "Query: When is water wet?\nAnswer: In the evening [1].\n"
        "Now it's your turn.\n------\nSource 1:\nThe mill is old.\n\n------\nQuery: Is it?\nAnswer: "
    )
    spans = [example[span.start : span.end] for pattern in PATTERNS for span in pattern.spans(example)]
    assert spans == ["The sky is red.", "Water is wet when the sky is red.", "The mill is old."]


def test_further_forms_come_from_a_file(tmp_path):
    file = tmp_path / "forms.toml"
    form = 'app = "Mine"\nstart = "### Passage {number} ({text})\\n"\nend = ["\\n### ", "{end}"]'
    file.write_text(f"[[pattern]]\n{form}\n")
    patterns = patterns_of(str(file))
    assert found("### Passage 1 (a.pdf)\none\n### Passage 2 (b.pdf)\ntwo\nlines", patterns) == ["one", "two\nlines"]
    assert patterns[1:] == PATTERNS


@pytest.mark.parametrize(
    ("form", "words"),
    [
        (None, "No such file"),
        ("x", "is not TOML"),
        ('start = "x"', r"pattern\.0\.end: Field required"),
        ('start = "{text}x"\nend = " "', "the marker ' ' has no text of its own"),
        ('start = "x{text}"\nend = "y"', "must be followed by text"),
        ('start = "x{end}y"\nend = "y"', "must be followed by text"),
    ],
)
def test_a_file_that_can_not_be_used_is_refused_in_words(form, words, tmp_path):
    file = tmp_path / "forms.toml"
    if form is not None:
        file.write_text(f'[[pattern]]\napp = "a"\n{form}\n')
    with pytest.raises(PatternError, match=words):
        patterns_of(str(file))


@pytest.mark.parametrize(
    "unit",
    [
        *('<source id="1">', '<source id="1">x</source>', "<source id=" + "\n" * 3, "<contextItem>\n" + " " * 30),
        *("[CONTEXT 1]:\n", "\n[END CONTEXT 1]", "[CONTEXT 1]:\n\n[END CONTEXT 2]", "<context>\n", "ordinary words "),
    ],
)
def test_the_time_grows_with_the_text_at_most(unit):
    find = finder(PATTERNS, lambda _: [])
    short, long = (cpu_seconds(find, unit * (length // len(unit))) for length in (4_000, 512_000))
    # Up to 4 times as much each, for what no longer fits into the CPU's caches; looks at all others: 128 times.
    assert long < 4 * 128 * max(short, 0.00005)
