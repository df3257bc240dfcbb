# SPDX-License-Identifier: Apache-2.0
"""Extraction of documents from vLLM's endpoints, and the place of their marked text."""

import copy

import pytest

from app.documents.document import BadRequestError, Document
from app.documents.openai_documents import from_anthropic, from_chat, from_completion, from_responses
from tests.app.helpers import refused

SEPARATOR = " # # "
A, B = Document("one"), Document("two")
JOINED = SEPARATOR.join(["one", "two", "why?"])


def user(content) -> dict:
    return {"role": "user", "content": content}


def text(value: str, kind: str = "text") -> dict:
    return {"type": kind, "text": value}


def document(data: str, **fields) -> dict:
    return {
        "type": "document",
        "source": {"type": "text", "media_type": "text/plain", "data": data},
        **fields,
    }


CHAT_ENDPOINTS = pytest.mark.parametrize(
    ("extract", "field"), [(from_chat, "messages"), (from_anthropic, "messages"), (from_responses, "input")]
)


@CHAT_ENDPOINTS
class TestChatEndpoints:
    """Common behaviour of chat completions, messages and responses."""

    def test_documents_go_before_the_first_user_text(self, extract, field):
        system, answer = {"role": "system", "content": "s"}, {"role": "assistant", "content": "a"}
        body = {
            "model": "m",
            field: [system, user("why?"), answer, user("and?")],
            "documents": ["one", {"text": "two"}],
        }
        extraction = extract(body, None)
        assert extraction.documents == [A, B]
        extraction.insert("<marked>")
        assert extraction.body[field] == [system, user("<marked>why?"), answer, user("and?")]
        assert extraction.body.keys() - {"store"} == {"model", field}

    def test_documents_go_before_the_first_text_part(self, extract, field):
        image = {"type": "image_url", "image_url": {"url": "data:,"}}
        extraction = extract({field: [user([image, text("why?"), text("really?")])], "documents": ["one"]}, None)
        extraction.insert("<marked>")
        assert extraction.body[field] == [user([image, text("<marked>why?"), text("really?")])]

    def test_a_user_text_is_split_by_the_servers_separator(self, extract, field):
        extraction = extract({field: [user("hello"), user(JOINED)]}, SEPARATOR)
        assert (extraction.documents, extraction.cache) == ([A, B], None)
        extraction.insert("<marked>")
        assert extraction.body[field] == [user("hello"), user("<marked>why?")]

    def test_a_text_part_is_split_too(self, extract, field):
        extraction = extract({field: [user([text("one|why?")])]}, "|")
        extraction.insert("<marked>")
        assert extraction.documents == [A]
        assert extraction.body[field] == [user([text("<marked>why?")])]

    def test_the_requests_separator_overrides_the_servers(self, extract, field):
        cache = {"separator": "|", "mode": "chunked"}
        extraction = extract({field: [user("one|two # # x|why?")], "cache": cache}, SEPARATOR)
        assert extraction.documents == [A, Document("two # # x")]
        assert extraction.cache == {"mode": "chunked"}
        assert "cache" not in extraction.body

    def test_the_requests_separator_needs_no_server_default(self, extract, field):
        assert extract({field: [user("one|why?")], "cache": {"separator": "|"}}, None).documents == [A]

    def test_given_documents_go_first_and_the_separator_stays_text(self, extract, field):
        extraction = extract({field: [user(JOINED)], "documents": ["one"]}, SEPARATOR)
        assert extraction.documents == [A]
        assert extraction.body[field] == [user(JOINED)]

    def test_a_cache_field_alone_gives_a_request_without_chunks(self, extract, field):
        extraction = extract({field: [user("why?")], "cache": {"mode": "full"}}, None)
        assert (extraction.documents, extraction.cache) == ([], {"mode": "full"})
        extraction.insert("<mark>")
        assert extraction.body[field] == [user("<mark>why?")]

    def test_an_empty_list_of_documents_is_a_request_without_chunks(self, extract, field):
        assert extract({field: [user("why?")], "documents": []}, None).documents == []

    def test_only_user_messages_are_split(self, extract, field):
        messages = [{"role": role, "content": JOINED} for role in ("system", "assistant", "tool")]
        assert extract({field: messages}, SEPARATOR) is None

    @pytest.mark.parametrize(
        "messages",
        [[user("why?")], [user(JOINED)], [], None, 5, "text", [5, None], [user(None)], [user([5])], [{}]],
    )
    def test_a_body_without_anything_of_ours_is_left_alone(self, extract, field, messages):
        body = {"model": "m", field: messages, "store": True, "documents": None}
        before = copy.deepcopy(body)
        assert extract(body, None) is None
        assert body == before

    def test_messages_that_are_no_objects_are_left_to_vllm(self, extract, field):
        extraction = extract({field: [5, user("why?")], "documents": ["one"]}, None)
        extraction.insert("<marked>")
        assert extraction.body[field] == [5, user("<marked>why?")]

    @pytest.mark.parametrize(
        "messages", [None, 5, [], [{"role": "system", "content": "s"}], [user([{"type": "image"}])]]
    )
    def test_documents_need_a_user_text(self, extract, field, messages):
        with refused("messages", "documents need a user message with text"):
            extract({field: messages, "documents": ["one"]}, None)

    def test_a_cache_field_needs_a_user_text(self, extract, field):
        with refused("cache", "no text that chunks could belong to"):
            extract({field: [], "cache": {}}, None)

    @pytest.mark.parametrize("separator", ["", 5, ["|"], {}])
    def test_a_separator_must_be_text(self, extract, field, separator):
        with refused("cache.separator", "must be a string with at least one character"):
            extract({field: [user("why?")], "cache": {"separator": separator}}, None)

    def test_bad_documents_are_named(self, extract, field):
        with refused("documents", "must be a list, not dict"):
            extract({field: [user("why?")], "documents": {}}, None)
        with refused("documents.1.text", "text is empty"):
            extract({field: [user("why?")], "documents": ["one", {"text": ""}]}, None)

    def test_an_empty_piece_is_no_chunk(self, extract, field):
        assert extract({field: [user("one||why?")]}, "|").documents == [A]
        assert extract({field: [user([{"type": "image"}, text("|why?")])]}, "|").documents == []

    def test_a_bad_chunk_names_its_message(self, extract, field):
        with refused(f"{field}.0.content.1.text", "not Unicode text"):
            extract({field: [user([{"type": "image"}, text("\ud800|why?")])]}, "|")


class TestResponses:
    def test_a_plain_input_is_a_user_text(self):
        extraction = from_responses({"input": "why?", "documents": ["one"]}, None)
        extraction.insert("<marked>")
        assert extraction.body == {"input": "<marked>why?", "store": False}

    def test_a_plain_input_is_split_by_the_separator(self):
        extraction = from_responses({"input": JOINED}, SEPARATOR)
        extraction.insert("<marked>")
        assert (extraction.documents, extraction.body["input"]) == ([A, B], "<marked>why?")

    def test_input_text_parts_are_text(self):
        extraction = from_responses({"input": [user([text("why?", "input_text")])], "documents": ["one"]}, None)
        extraction.insert("<marked>")
        assert extraction.body["input"] == [user([text("<marked>why?", "input_text")])]

    def test_answers_are_not_stored_unless_asked_for(self):
        assert from_responses({"input": "why?", "documents": []}, None).body["store"] is False
        assert from_responses({"input": "why?", "documents": [], "store": True}, None).body["store"] is True


class TestCompletion:
    def test_the_first_piece_is_the_system_segment_and_nothing_is_stripped(self):
        extraction = from_completion({"prompt": "sys\n # # one # # two # #  why?", "max_tokens": 3}, SEPARATOR)
        assert extraction.documents == [A, B]
        extraction.insert("<marked>")
        assert extraction.body == {"prompt": "sys\n<marked> why?", "max_tokens": 3}

    def test_the_system_segment_may_be_empty(self):
        extraction = from_completion({"prompt": "|one|why?", "cache": {"separator": "|"}}, None)
        extraction.insert("<marked>")
        assert (extraction.documents, extraction.cache) == ([A], {})
        assert extraction.body == {"prompt": "<marked>why?"}

    def test_one_separator_gives_no_chunk(self):
        assert from_completion({"prompt": "sys|why?"}, "|").documents == []

    @pytest.mark.parametrize("prompt", ["why?", "", None, 5, [1, 2], ["one|two|why?"]])
    def test_other_prompts_are_left_alone(self, prompt):
        body = {"prompt": prompt}
        assert from_completion(body, "|") is None
        assert body == {"prompt": prompt}
        assert from_completion({}, "|") is None

    def test_without_a_separator_nothing_is_split(self):
        assert from_completion({"prompt": JOINED}, None) is None

    def test_documents_are_refused(self):
        with refused("documents", "documents need a chat endpoint"):
            from_completion({"prompt": "why?", "documents": ["one"]}, None)

    @pytest.mark.parametrize("prompt", ["why?", [1, 2], ["one|why?"]])
    def test_a_cache_field_needs_a_separated_prompt(self, prompt):
        with refused("cache", "no text that chunks could belong to"):
            from_completion({"prompt": prompt, "cache": {"separator": "|"}}, None)

    def test_an_empty_piece_is_no_chunk(self):
        assert from_completion({"prompt": "sys| |one||why?"}, "|").documents == [A]


class TestAnthropic:
    def test_document_blocks_go_into_the_text_behind_them(self):
        blocks = [
            document("one", title="T"),
            document("two"),
            text("why?") | {"cache_control": {}},
            text("really?"),
        ]
        extraction = from_anthropic({"model": "m", "messages": [user(blocks)]}, None)
        assert extraction.documents == [Document("one", title="T"), B]
        extraction.insert("<marked>")
        expected = [text("<marked>why?") | {"cache_control": {}}, text("really?")]
        assert extraction.body == {"model": "m", "messages": [user(expected)]}

    def test_documents_behind_the_question_or_without_one_get_a_text_of_their_own(self):
        image = {"type": "image", "source": {}}
        extraction = from_anthropic({"messages": [user([text("why?"), document("one"), image])]}, None)
        extraction.insert("<marked>")
        assert extraction.body["messages"] == [user([text("why?"), text("<marked>"), image])]
        extraction = from_anthropic({"messages": [user([document("one")])]}, None)
        extraction.insert("<marked>")
        assert extraction.body["messages"] == [user([text("<marked>")])]

    @pytest.mark.parametrize(
        ("messages", "parameter"),
        [
            ([user([document("one"), text("why?"), document("two"), text("and?")])], "messages.0.content.2"),
            ([user([document("one"), text("why?")]), user([document("two"), text("and?")])], "messages.1.content.0"),
        ],
    )
    def test_documents_in_several_places_are_refused(self, messages, parameter):
        """Printed as text, they would be tokenized as the user's message, with control tokens recognised."""
        with pytest.raises(BadRequestError, match="one after another") as refused:
            from_anthropic({"messages": messages}, None)
        assert refused.value.parameter == parameter

    @pytest.mark.parametrize(
        ("source", "expected"),
        [
            ({"type": "text", "data": "one"}, "one"),
            ({"type": "content", "content": "one"}, "one"),
            ({"type": "content", "content": [text("one"), {"type": "image"}, text("two")]}, "one\ntwo"),
        ],
    )
    def test_sources_of_text_and_content(self, source, expected):
        extraction = from_anthropic({"messages": [user([{"type": "document", "source": source}])]}, None)
        assert extraction.documents == [Document(expected)]

    def test_a_documents_context_is_part_of_its_text(self):
        block = document("one", title="T", context=" of 1990 ")
        (made,) = from_anthropic({"messages": [user([block])]}, None).documents
        assert made.render() == "T\nof 1990\none\n\n"

    def test_the_cache_field_and_a_system_prompt_beside_documents(self):
        body = {"messages": [user([document("one")])], "system": "s", "cache": {"mode": "chunked"}}
        extraction = from_anthropic(body, None)
        assert extraction.cache == {"mode": "chunked"}
        assert extraction.body.keys() == {"messages", "system"}

    def test_document_blocks_of_an_assistant_are_left_alone(self):
        body = {"messages": [{"role": "assistant", "content": [document("one")]}]}
        assert from_anthropic(body, None) is None

    @pytest.mark.parametrize(
        ("source", "parameter", "message"),
        [
            (
                {"type": "base64", "data": "…"},
                "source.type",
                "document source 'base64' is not supported; send text",
            ),
            ({"type": "url", "url": "http://x"}, "source.type", "'url' is not supported"),
            ({}, "source.type", "None is not supported"),
            (None, "source.type", "None is not supported"),
            ("one", "source.type", "None is not supported"),
            ({"type": "text"}, "source", "text must be a string, not NoneType"),
            ({"type": "text", "data": " "}, "source", "text is empty"),
            ({"type": "content", "content": []}, "source", "text is empty"),
            ({"type": "content", "content": None}, "source", "text is empty"),
            ({"type": "content", "content": [{"type": "image"}, 5]}, "source", "text is empty"),
        ],
    )
    def test_bad_sources_are_named(self, source, parameter, message):
        blocks = [document("one"), {"type": "document", "source": source}, text("why?")]
        with refused(f"messages.1.content.1.{parameter}", message):
            from_anthropic({"messages": [user("hello"), user(blocks)]}, None)

    @pytest.mark.parametrize("content", [5, True])
    def test_a_source_content_that_is_no_list_is_named(self, content):
        block = {"type": "document", "source": {"type": "content", "content": content}}
        with refused("messages.0.content.0.source"):
            from_anthropic({"messages": [user([block])]}, None)

    def test_a_bad_title_is_named(self):
        with refused("messages.0.content.0.source", "title must be a string, not int"):
            from_anthropic({"messages": [user([document("one", title=5)])]}, None)
