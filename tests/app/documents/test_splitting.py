# SPDX-License-Identifier: Apache-2.0
"""Texts are split into documents of bounded length without loss."""

from hypothesis import given
from hypothesis import strategies as st

from app.documents.document import Document
from app.documents.splitting import split_markdown, split_text
from tests.support.words import words


def titled(pieces):
    return [(piece.document.title, piece.document.text) for piece in pieces]


def test_a_short_text_is_one_piece():
    (piece,) = split_text("One two.\n\nThree.", 10, words)
    assert (piece.document, piece.num_tokens) == (Document("One two.\n\nThree."), 3)


def test_paragraphs_stay_together_where_they_fit():
    paragraphs = ["a b c", "d e f", "g h i", "j"]
    text = "\r\n  \n\n".join(paragraphs)
    # Each paragraph counts two more, for the blank line.
    assert [text for _, text in titled(split_text(text, 10, words))] == ["a b c\n\nd e f", "g h i\n\nj"]


def test_a_long_paragraph_is_cut_between_sentences_then_between_words():
    sentences = "One two three four. Five six seven eight. Nine ten eleven twelve. Last one of these."
    assert [text for _, text in titled(split_text(sentences, 8, words))] == [
        "One two three four. Five six seven eight.",
        "Nine ten eleven twelve. Last one of these.",
    ]
    assert [text for _, text in titled(split_text("a b c d e f", 3, words))] == ["a b", "c d", "e f"]


def test_a_text_without_pauses_is_cut_anywhere():
    pieces = list(split_text("x" * 1000, 100, lambda document: len(document.text)))
    assert "".join(piece.document.text for piece in pieces) == "x" * 1000
    assert max(piece.num_tokens for piece in pieces) <= 100


def test_markdown_is_split_at_headings_which_become_titles():
    text = """Before.

# Guide
## Setup ##
Install it.
```
# a comment
```
## Use
Use it.
# Notes
None."""
    assert titled(split_markdown(text, 50, words)) == [
        (None, "Before."),
        ("Guide › Setup", "Install it.\n```\n# a comment\n```"),
        ("Guide › Use", "Use it."),
        ("Notes", "None."),
    ]


def test_a_title_counts():
    pieces = list(split_text("a b c d e f", 5, words, title="T U"))
    assert all(piece.num_tokens == words(piece.document) <= 5 for piece in pieces)
    assert {piece.document.title for piece in pieces} == {"T U"}


def test_a_title_that_leaves_no_room_is_left_out():
    assert titled(split_markdown("# a very long heading indeed\ntext", 6, words)) == [(None, "text")]


def test_nothing_but_headings_and_blanks_is_nothing():
    assert titled(split_markdown("# One\n\n# Two\n \n", 10, words)) == []
    assert titled(split_text(" \n\n ", 10, words)) == []


@given(st.text(alphabet="ab .\n#`", max_size=300), st.integers(1, 20))
def test_no_word_is_lost_and_no_piece_is_too_long(text, max_tokens):
    pieces = list(split_text(text, max_tokens, words))
    assert "".join("".join(piece.document.text.split()) for piece in pieces) == "".join(text.split())
    assert all(piece.num_tokens == words(piece.document) <= max_tokens for piece in pieces)
