# SPDX-License-Identifier: Apache-2.0
"""Documents: forms that clients send, and their texts."""

import pytest

from app.documents.document import MOST_DOCUMENTS, Document, checked_document, parse_documents, split_by_separator
from tests.app.helpers import refused


@pytest.mark.parametrize(
    ("sent", "document"),
    [
        ("plain", Document("plain")),
        ({"text": "t", "title": "T", "id": "d1"}, Document("t", "d1", "T")),
        ({"text": "t", "title": None, "id": None, "source": 5}, Document("t")),
        ({"id": "d1", "data": {"title": "T", "snippet": "s"}}, Document("s", "d1", "T")),
        ({"id": "d1", "data": {"text": "t"}}, Document("t", "d1")),
        ({"id": "d1", "data": "plain"}, Document("plain", "d1")),
    ],
)
def test_each_shape_gives_a_document(sent, document):
    assert parse_documents([sent]) == [document]


def test_there_is_a_most_number_of_documents():
    """Counted before any is made: a separator of one character may make a million of one text."""
    parse_documents(["a"] * MOST_DOCUMENTS)
    with refused("documents", f"at most {MOST_DOCUMENTS} chunks, not {MOST_DOCUMENTS + 1}"):
        parse_documents(["a"] * (MOST_DOCUMENTS + 1))
    assert len(split_by_separator("a " * MOST_DOCUMENTS, " ", "prompt")[0]) == MOST_DOCUMENTS
    with refused("prompt", f"at most {MOST_DOCUMENTS} chunks, not {4 << 20}"):
        split_by_separator("a " * (4 << 20), " ", "prompt")


@pytest.mark.parametrize(
    ("sent", "place", "message"),
    [
        (5, "", "an object or a string, not int"),
        (" \n", "", "text is empty"),
        ({"title": "T"}, "", r"needs a text \(or data.snippet\)"),
        ({"text": ""}, ".text", "text is empty"),
        ({"text": ["a"]}, ".text", "text must be a string, not list"),
        ({"text": "t", "id": 7}, ".text", "id must be a string, not int"),
        ({"text": "t", "title": {}}, ".text", "title must be a string, not dict"),
        ({"data": {"snippet": None}}, ".snippet", "text must be a string, not NoneType"),
        ({"data": {"title": "T"}}, "", "needs a text"),
        ({"data": None}, ".data", "data must be an object or a string"),
        ({"data": ""}, ".data", "text is empty"),
    ],
)
def test_an_error_names_the_field(sent, place, message):
    for path in ("documents", "chunks"):
        with refused(f"{path}.1{place}", message):
            parse_documents(["fine", sent], path)
    for no_list in ({}, "text", None):
        with refused("documents", f"documents must be a list, not {type(no_list).__name__}"):
            parse_documents(no_list)
    with refused("here", "text is empty"):
        checked_document(" ", None, None, "here")


def test_a_label_is_the_title_or_how_the_text_begins():
    documents = Document("t", title=" T\n1 "), Document("\n a  b\nc", title=" "), Document("桥" * 500)
    assert [document.label for document in documents] == ["T 1", "a b c", "桥" * 80]


@pytest.mark.parametrize(
    ("document", "text"),
    [
        (Document(" \nt\n\n\n", id="d1"), "t\n\n"),
        (Document("t", title=" T \n"), "T\nt\n\n"),
        (Document("t", title="  "), "t\n\n"),
        (Document("a\n\n b"), "a\n\n b\n\n"),
        (Document(" \n\r\n    if x:\n        y()\n\n ", None, " T "), "T\n    if x:\n        y()\n\n"),
        (Document("\n    if x:\n        y()\n"), "    if x:\n        y()\n\n"),
        (Document("\n \n", None, "T"), "T\n\n"),
    ],
)
def test_a_document_renders_alike_whoever_sends_it(document, text):
    """White space around it is left out, but for the indentation of its first line."""
    assert document.render() == text


@pytest.mark.parametrize(
    ("text", "separator", "texts", "question"),
    [
        ("one # # two # # why? ", " # # ", ["one", "two"], "why?"),
        (" why? ", " # # ", [], " why? "),  # unchanged
        # Blanks behind a separator are indentation only if it ends its line.
        ("  a\n  b | c | d", "|", ["a\n  b ", "c "], "d"),
        ("  a\n  b\n---\n  c\n---\nd", "\n---\n", ["  a\n  b", "  c"], "d"),
        # An empty piece is no chunk.
        ("one||why?", "|", ["one"], "why?"),
        ("|one|why?", "|", ["one"], "why?"),
        ("one | \n| why?", "|", ["one "], "why?"),
        ("||why?", "|", [], "why?"),
    ],
)
def test_a_separator_splits_documents_from_the_question(text, separator, texts, question):
    assert split_by_separator(text, separator, "p") == ([Document(each) for each in texts], question)
