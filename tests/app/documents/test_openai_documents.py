# SPDX-License-Identifier: Apache-2.0
"""Extraction of documents from vLLM's endpoints, and the place of their marked text."""

import copy

import pytest

from app.documents.document import Document
from app.documents.openai_documents import from_anthropic, from_chat, from_completion, from_responses
from tests.app.helpers import refused

SEPARATOR = " # # "
A, B = Document("one"), Document("two")
JOINED = SEPARATOR.join(["one", "two", "why?"])
IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}
CONTROL = {"cache_control": {}}


def user(content) -> dict:
    return {"role": "user", "content": content}


def text(value: str, kind: str = "text") -> dict:
    return {"type": kind, "text": value}


def document(data: str, **fields) -> dict:
    return {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": data}, **fields}


def of_content(content) -> dict:
    return {"type": "document", "source": {"type": "content", "content": content}}


def marked(extract, body, separator=None):
    """The documents, and the body with a mark in their place."""
    extraction = extract(body, separator)
    extraction.insert("<marked>")
    return extraction.documents, extraction.body


@pytest.mark.parametrize(
    ("extract", "field"), [(from_chat, "messages"), (from_anthropic, "messages"), (from_responses, "input")]
)
class TestChatEndpoints:
    """Common behaviour of chat completions, messages and responses."""

    def test_documents_go_before_the_first_user_text(self, extract, field):
        system, answer = {"role": "system", "content": "s"}, {"role": "assistant", "content": "a"}
        turns = [5, system, user("why?"), answer, user("and?")]  # what is no object is left to vLLM
        documents, body = marked(extract, {"model": "m", field: turns, "documents": ["one", {"text": "two"}]})
        assert documents == [A, B]
        assert body[field] == [5, system, user("<marked>why?"), answer, user("and?")]
        assert body.keys() - {"store"} == {"model", field}

    @pytest.mark.parametrize(
        ("content", "separator", "fields", "documents", "expected"),
        [
            ([IMAGE, text("why?"), text("x")], None, {"documents": ["one"]}, [A], [IMAGE, text("<>why?"), text("x")]),
            (JOINED, SEPARATOR, {}, [A, B], "<>why?"),
            ([text("one|why?")], "|", {}, [A], [text("<>why?")]),
            ("one|# # |why?", "# #", {"cache": {"separator": "|"}}, [A, Document("# # ")], "<>why?"),
            ("one|why?", None, {"cache": {"separator": "|"}}, [A], "<>why?"),
            (JOINED, SEPARATOR, {"documents": ["one"]}, [A], f"<>{JOINED}"),  # given ones go first
            ("why?", None, {"cache": {"mode": "full"}}, [], "<>why?"),
            ("why?", None, {"documents": []}, [], "<>why?"),
            ("one||why?", "|", {}, [A], "<>why?"),
            ([IMAGE, text("|why?")], "|", {}, [], [IMAGE, text("<>why?")]),
        ],
    )
    def test_the_place_of_documents(self, extract, field, content, separator, fields, documents, expected):
        found, body = marked(extract, {field: [user(content)], **fields}, separator)
        assert found == documents
        assert repr(body[field]) == repr([user(expected)]).replace("<>", "<marked>")

    def test_the_cache_field_is_taken_out_without_its_separator(self, extract, field):
        cache = {"separator": "|", "mode": "chunked"}
        extraction = extract({field: [user("hello"), user("one|why?")], "cache": cache}, None)
        assert extraction.cache == {"mode": "chunked"}
        assert extraction.body.keys() - {"store"} == {field}
        assert extract({field: [user(JOINED)]}, SEPARATOR).cache is None

    @pytest.mark.parametrize("messages", [[user("why?")], [user(JOINED)], [], None, 5, [5, None], [user([5])], [{}]])
    def test_a_body_without_anything_of_ours_is_left_alone(self, extract, field, messages):
        body = {"model": "m", field: messages, "store": True, "documents": None}
        before = copy.deepcopy(body)
        assert extract(body, None) is None
        assert body == before

    def test_only_user_messages_are_split(self, extract, field):
        messages = [{"role": role, "content": JOINED} for role in ("system", "assistant", "tool")]
        assert extract({field: messages}, SEPARATOR) is None

    @pytest.mark.parametrize("messages", [None, 5, [{"role": "system", "content": "s"}], [user([{"type": "image"}])]])
    def test_documents_need_a_user_text(self, extract, field, messages):
        with refused("messages", "documents need a user message with text"):
            extract({field: messages, "documents": ["one"]}, None)
        with refused("cache", "no text that chunks could belong to"):
            extract({field: messages, "cache": {}}, None)

    @pytest.mark.parametrize("separator", ["", 5, ["|"]])
    def test_a_separator_must_be_text_and_a_bad_document_is_named(self, extract, field, separator):
        with refused("cache.separator", "must be a string with at least one character"):
            extract({field: [user("why?")], "cache": {"separator": separator}}, None)
        with refused("documents.1.text", "text is empty"):
            extract({field: [user("why?")], "documents": ["one", {"text": ""}]}, None)


def test_a_plain_input_of_responses_and_input_text_parts_are_text():
    expected = [A], {"input": "<marked>why?", "store": False}  # answers are stored if that is asked for
    assert marked(from_responses, {"input": "why?", "documents": ["one"]}) == expected
    assert from_responses({"input": "why?", "documents": [], "store": True}, None).body["store"] is True
    documents, body = marked(from_responses, {"input": JOINED}, SEPARATOR)
    assert (documents, body["input"]) == ([A, B], "<marked>why?")
    _, body = marked(from_responses, {"input": [user([text("why?", "input_text")])], "documents": ["one"]})
    assert body["input"] == [user([text("<marked>why?", "input_text")])]


class TestCompletion:
    @pytest.mark.parametrize(
        ("prompt", "documents", "expected"),
        [
            ("sys\n|one|two|  why?", [A, B], "sys\n<marked>  why?"),
            ("|one|why?", [A], "<marked>why?"),
            ("sys|why?", [], "sys<marked>why?"),
            ("sys| |one||why?", [A], "sys<marked>why?"),
        ],
    )
    def test_the_first_piece_is_the_system_segment_and_nothing_is_stripped(self, prompt, documents, expected):
        made = marked(from_completion, {"prompt": prompt, "max_tokens": 3}, "|")
        assert made == (documents, {"prompt": expected, "max_tokens": 3})
        assert marked(from_completion, {"prompt": prompt, "cache": {"separator": "|"}})[0] == documents

    @pytest.mark.parametrize("prompt", ["why?", None, [1, 2], ["one|two|why?"]])
    def test_other_prompts_are_left_alone_but_with_a_cache_field(self, prompt):
        assert from_completion({"prompt": prompt}, "|") is None
        with refused("cache", "no text that chunks could belong to"):
            from_completion({"prompt": prompt, "cache": {"separator": "|"}}, None)
        assert from_completion({"prompt": JOINED}, None) is None
        with refused("documents", "documents need a chat endpoint"):
            from_completion({"prompt": "why?", "documents": ["one"]}, None)


class TestAnthropic:
    @pytest.mark.parametrize(
        ("blocks", "expected"),
        [
            ([document("one"), text("why?") | CONTROL, text("?")], [text("<marked>why?") | CONTROL, text("?")]),
            ([text("why?"), document("one"), IMAGE], [text("why?"), text("<marked>"), IMAGE]),
            ([document("one")], [text("<marked>")]),
        ],
    )
    def test_document_blocks_go_into_the_text_behind_them_or_into_one_of_their_own(self, blocks, expected):
        documents, body = marked(from_anthropic, {"model": "m", "messages": [user(blocks)], "system": "s"})
        assert (documents, body) == ([A], {"model": "m", "messages": [user(expected)], "system": "s"})

    @pytest.mark.parametrize(
        ("messages", "parameter"),
        [
            ([user([document("one"), text("why?"), document("two"), text("and?")])], "messages.0.content.2"),
            ([user([document("one"), text("why?")]), user([document("two"), text("and?")])], "messages.1.content.0"),
        ],
    )
    def test_documents_in_several_places_are_refused(self, messages, parameter):
        """Printed as text, they would be tokenized as the user's message, with control tokens recognised."""
        with refused(parameter, "one after another"):
            from_anthropic({"messages": messages}, None)

    @pytest.mark.parametrize(
        ("block", "rendered"),
        [
            (document("one", title="T", context=" of 1990 "), "T\nof 1990\none\n\n"),
            (of_content("one"), "one\n\n"),
            (of_content([text("one"), IMAGE, text("two")]), "one\ntwo\n\n"),
        ],
    )
    def test_a_block_is_a_document(self, block, rendered):
        extraction = from_anthropic({"messages": [user([block])], "cache": {"mode": "full"}}, None)
        assert [made.render() for made in extraction.documents] == [rendered]
        assert extraction.cache == {"mode": "full"}
        assert from_anthropic({"messages": [{"role": "assistant", "content": [block]}]}, None) is None

    @pytest.mark.parametrize(
        ("source", "parameter", "message"),
        [
            ({"type": "base64"}, "source.type", "document source 'base64' is not supported; send text"),
            ({}, "source.type", "None is not supported"),
            ("one", "source.type", "None is not supported"),
            ({"type": "text"}, "source", "text must be a string, not NoneType"),
            ({"type": "text", "data": " "}, "source", "text is empty"),
            ({"type": "content", "content": None}, "source", "text is empty"),
            ({"type": "content", "content": [{"type": "image"}, 5]}, "source", "text is empty"),
            ({"type": "content", "content": 5}, "source", None),
        ],
    )
    def test_a_bad_source_is_named(self, source, parameter, message):
        blocks = [document("one"), {"type": "document", "source": source}, text("why?")]
        with refused(f"messages.1.content.1.{parameter}", message):
            from_anthropic({"messages": [user("hello"), user(blocks)]}, None)
        with refused("messages.0.content.0.source", "title must be a string, not int"):
            from_anthropic({"messages": [user([document("one", title=5)])]}, None)
