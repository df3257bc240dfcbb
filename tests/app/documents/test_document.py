# SPDX-License-Identifier: Apache-2.0
"""Documents: forms that clients send, and their texts."""

import pytest

from app.documents.document import MOST_DOCUMENTS, Document, checked_document, parse_documents, split_by_separator
from tests.app.helpers import refused


@pytest.mark.parametrize(
    ("sent", "document"),
    [
        ("plain", Document("plain")),
        ({"text": "t"}, Document("t")),
        ({"text": "t", "title": "T", "id": "d1"}, Document("t", "d1", "T")),
        ({"text": "t", "title": None, "id": None, "source": 5}, Document("t")),
        ({"data": {"snippet": "s"}}, Document("s")),
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


def test_no_documents_are_no_error():
    assert parse_documents([]) == []


@pytest.mark.parametrize("sent", [{}, "text", 5, None])
def test_documents_must_be_a_list(sent):
    with refused("documents", f"documents must be a list, not {type(sent).__name__}"):
        parse_documents(sent)


@pytest.mark.parametrize(
    ("sent", "parameter", "message"),
    [
        (5, "documents.1", "an object or a string, not int"),
        (None, "documents.1", "an object or a string, not NoneType"),
        (["a"], "documents.1", "an object or a string, not list"),
        (" \n", "documents.1", "text is empty"),
        ({}, "documents.1", r"needs a text \(or data.snippet\)"),
        ({"title": "T"}, "documents.1", "needs a text"),
        ({"text": ""}, "documents.1.text", "text is empty"),
        ({"text": ["a"]}, "documents.1.text", "text must be a string, not list"),
        ({"text": "t", "id": 7}, "documents.1.text", "id must be a string, not int"),
        ({"text": "t", "title": {}}, "documents.1.text", "title must be a string, not dict"),
        ({"data": {"snippet": None}}, "documents.1.snippet", "text must be a string, not NoneType"),
        ({"data": {"title": "T"}}, "documents.1", "needs a text"),
        ({"data": None}, "documents.1.data", "data must be an object or a string"),
        ({"data": ""}, "documents.1.data", "text is empty"),
    ],
)
def test_an_error_names_the_field(sent, parameter, message):
    with refused(parameter, message):
        parse_documents(["fine", sent])


def test_another_path_is_named_as_it_is():
    with refused("chunks.0", "text is empty"):
        parse_documents([""], "chunks")
    with refused("here", "text is empty"):
        checked_document(" ", None, None, "here")


@pytest.mark.parametrize(
    ("document", "text"),
    [
        (Document("t"), "t\n\n"),
        (Document(" \nt\n\n\n"), "t\n\n"),
        (Document("t", title="T"), "T\nt\n\n"),
        (Document("t", title=" T \n"), "T\nt\n\n"),
        (Document("t", title="  "), "t\n\n"),
        (Document("a\n\n b"), "a\n\n b\n\n"),
        (Document("t", id="d1"), "t\n\n"),
    ],
)
def test_a_document_renders_alike_whoever_sends_it(document, text):
    assert document.render() == text


def test_a_separator_splits_documents_from_the_question():
    documents, question = split_by_separator("one # # two # # why? ", " # # ", "messages.0.content")
    assert documents == [Document("one"), Document("two")]
    assert question == "why?"


def test_the_first_line_keeps_its_indentation():
    code = "    if x:\n        y()\n"
    assert Document(f" \n\r\n{code}\n ", None, " T ").render() == f"T\n{code}\n"
    assert Document(f"\n{code}").render() == f"{code}\n"
    assert Document("\n \n", None, "T").render() == "T\n\n"


def test_blanks_behind_a_separator_are_indentation_only_if_it_ends_its_line():
    assert split_by_separator("  a\n  b | c | d", "|", "p")[0] == [Document("a\n  b "), Document("c ")]
    assert split_by_separator("  a\n  b\n---\n  c\n---\nd", "\n---\n", "p")[0] == [
        Document("  a\n  b"),
        Document("  c"),
    ]


def test_text_without_the_separator_is_the_question_unchanged():
    assert split_by_separator(" why? ", " # # ", "p") == ([], " why? ")


@pytest.mark.parametrize("text", ["one||why?", "|one|why?", "one | \n| why?"])
def test_an_empty_piece_between_separators_is_no_chunk(text):
    documents, question = split_by_separator(text, "|", "messages.0.content")
    assert ([each.text.strip() for each in documents], question) == (["one"], "why?")
    assert split_by_separator("||why?", "|", "messages.0.content") == ([], "why?")
