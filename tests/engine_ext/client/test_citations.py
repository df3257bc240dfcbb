# SPDX-License-Identifier: Apache-2.0
"""The sentences of an answer, and the chunks that each rests on."""

import pytest

from engine_ext.client.citations import citations, sentences


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The bridge is 3.5 km long. It is old!", ["The bridge is 3.5 km long.", "It is old!"]),
        ("One line\nand another.\n\n  A third", ["One line", "and another.", "A third"]),
        ('He said "no." Then he left (at last).', ['He said "no."', "Then he left (at last)."]),
        ("桥很长。磨坊很旧。", ["桥很长。", "磨坊很旧。"]),
        ("Wait... what?! Yes", ["Wait...", "what?!", "Yes"]),
        ("...", ["..."]),
        ("\n \n", []),
        ("", []),
    ],
)
def test_sentences(text: str, expected: list[str]) -> None:
    assert [text[start:end] for start, end in sentences(text)] == expected


def test_each_sentence_rests_on_the_chunks_that_get_more_than_from_a_question_without_content() -> None:
    text, ends = "A b. C d.", [1, 3, 4, 6, 9]
    attention = [[0.1, 0.0, 0.4], [0.1, 0.1, 0.2], [0.1, 0.0, 0.0], [0.2, 0.2, 0.1], [0.2, 0.2, 0.1]]
    first, second = citations(text, ends, attention, [4.0, 4.0, 2.0])
    assert (first.start, first.end) == (0, 4)
    assert [each.chunk for each in first.chunks if not each.is_weak] == [2]
    assert (first.chunks[0].share, first.chunks[0].lift) == (pytest.approx(0.6), pytest.approx(3))
    assert (second.start, second.end) == (5, 9)
    assert all(each.is_weak for each in second.chunks)


def test_no_more_than_three_are_listed() -> None:
    (only,) = citations("Yes", [3], [[4, 5, 3, 6, 0]], [1, 1, 1, 1, 20])
    assert [each.chunk for each in only.chunks] == [3, 1, 0]


def test_chunks_without_any_attention() -> None:
    (only,) = citations("Yes", [3], [[0.0, 0.0]], [0.0, 0.0])
    assert all(each.is_weak for each in only.chunks)
