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


def test_each_sentence_rests_on_the_chunks_that_its_tokens_attend_to_most() -> None:
    text, ends = "A b. C d.", [1, 3, 4, 6, 9]
    attention = [[0.1, 0.0, 0.3], [0.1, 0.0, 0.1], [0.1, -0.1, 0.1], [-0.2, -0.1, 0.0], [0.0, -0.3, 0.0]]
    first, second = citations(text, ends, attention)
    assert (first.start, first.end) == (0, 4)
    assert [(each.chunk, each.share) for each in first.chunks] == [(2, pytest.approx(0.625)), (0, pytest.approx(0.375))]
    assert (second.start, second.end, second.chunks) == (5, 9, [])


def test_a_chunk_with_a_small_share_is_not_cited() -> None:
    (only,) = citations("Yes", [3], [[0.9, 0.05, 0.02, 0.3]])
    assert [each.chunk for each in only.chunks] == [0, 3]
