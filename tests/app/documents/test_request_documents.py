# SPDX-License-Identifier: Apache-2.0
"""Routers and replicas compute the same document keys."""

import asyncio
import json
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.documents.document import MOST_DOCUMENTS
from app.documents.openai_documents import EXTRACTORS
from app.documents.patterns import Pattern
from app.documents.rag_request import RagChatRequest
from app.documents.request_documents import RAG_PATHS, Reading, conversation_of, parse_body, wanted_documents
from app.intake import take_in
from app.settings import Settings
from replicas.document_keys import id_key
from tests.app.bodies import bodies
from tests.app.helpers import refused
from tests.fuzzing import ends, json_values
from tests.support.context import make_context
from tests.support.registries import InProcessRegistry

USER = {"role": "user", "content": "?"}
CHAT = "/v1/chat/completions"


SEPARATED = Reading(separator="##")


def keys(path, body, reading=Reading()):  # noqa: B008 – frozen
    parsed = parse_body(path, json.dumps(body).encode())
    return [document.key for document in wanted_documents(path, parsed, reading)]


def rag(**fields):
    return keys("/v1/rag/chat", {"system": "S", "chunks": ["one", "two"], "question": "?", **fields})


def ticket_keys(settings=None, **fields):
    """Keys as computed by the replica."""
    request = RagChatRequest(**{"system": "S", "chunks": ["one", "two"], "question": "?", **fields})
    context = make_context(settings=settings or Settings(), registry=InProcessRegistry())
    return list(asyncio.run(take_in(context, request))[1].document_keys)


def test_of_more_chunks_than_a_call_may_bring_none_is_looked_for():
    """A look at the tiers for each would keep the ids of all others waiting."""
    cache = Mock()
    chunks = [{"id": str(number)} for number in range(MOST_DOCUMENTS + 1)]
    request = RagChatRequest(chunks=chunks, question="?")
    with refused("chunks", f"at most {MOST_DOCUMENTS} chunks"):
        asyncio.run(take_in(make_context(engine=SimpleNamespace(cache=cache)), request))
    assert not cache.mock_calls


@pytest.mark.parametrize(
    ("fields", "has_other_keys"),
    [
        ({}, False),
        ({"question": None, "system": "", "messages": [{"role": "system", "content": "S"}, USER]}, False),
        ({"system": ""}, True),
        ({"model": "m"}, True),
        ({"cache_salt": "x"}, True),
        ({"cache": {"namespace": "n"}}, True),
        ({"cache": {"scope": "isolated"}}, True),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]}, True),
        ({"chunks": [{"text": "one", "title": "T", "id": "d1"}, {"text": "two", "title": "T"}]}, True),
    ],
)
def test_a_replica_finds_the_keys_that_a_router_finds(fields, has_other_keys):
    """Documents with other KV have other keys."""
    found = rag(**fields)
    assert ticket_keys(**fields) == found
    assert set(found).isdisjoint(rag()) == has_other_keys


def test_without_a_registry_nothing_is_hashed_and_an_id_without_a_text_is_required():
    request = RagChatRequest(chunks=["one"], question="?")
    assert asyncio.run(take_in(make_context(), request))[1].document_keys == ()
    body = {"chunks": [{"id": "d1"}, "text"], "question": "?", "cache": {"namespace": "n"}}
    by_id, by_text = wanted_documents("/v1/rag/chat", body)
    assert (by_id.key, by_id.is_required, by_text.is_required) == (id_key("n", "d1"), True, False)


def test_a_router_reads_further_forms():
    body = {"messages": [{"role": "user", "content": "### Passage\none\n### Question\n?"}]}
    mine = Pattern("mine", "### Passage\n", ("\n### ",))
    assert keys(CHAT, body, Reading(documents="auto")) == []
    assert len(keys(CHAT, body, Reading(documents="auto", patterns=[mine]))) == 1


def test_a_body_stays_as_it_was_read():
    """It may go to two replicas."""
    block = {"type": "document", "source": {"type": "text", "data": "one"}}
    for path, body in (
        ("/v1/messages", {"messages": [{"role": "user", "content": [block, {"type": "text", "text": "?"}]}]}),
        (CHAT, {"messages": [USER], "documents": ["one"]}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "one##?"}]}], "cache": {}}),
        ("/v1/responses", {"input": [USER], "documents": ["one"]}),
        ("/v1/completions", {"prompt": "S##one##?", "cache": {}}),
    ):
        before = json.dumps(body)
        assert len(wanted_documents(path, body, SEPARATED)) == 1
        assert json.dumps(body) == before


def test_the_same_documents_in_any_scheme_have_the_same_keys():
    system, messages = [{"type": "text", "text": "S"}], [{"role": "system", "content": "S"}, USER]
    blocks = [{"type": "document", "source": {"type": "text", "data": text}} for text in ("one", "two")]
    same = [
        rag(question=None, system=None, messages=messages),
        keys("/v1/rag/plan", {"system": "S", "chunks": [{"text": "one"}, "two"], "question": "else"}),
        keys("/v1/rag/chunks", {"system": "S", "chunks": ["one", "two"]}),
        keys(CHAT, {"messages": messages, "documents": ["one", "two"]}),
        keys(CHAT, {"messages": [messages[0], {"role": "user", "content": "one##two##?"}]}, SEPARATED),
        keys("/v1/responses", {"instructions": "S", "input": "?", "documents": ["one", "two"]}),
        keys("/v1/messages", {"system": system, "messages": [{"role": "user", "content": [*blocks, system[0]]}]}),
        keys("/v1/completions", {"prompt": "S##one##two##?"}, SEPARATED),
    ]
    assert all(found == rag() for found in same)


@pytest.mark.parametrize("cache", [{}, {"scope": "system"}, {"scope": "isolated"}])
def test_the_servers_scope_is_that_of_requests_that_name_none(cache):
    isolated = Reading(scope="isolated")
    first, second = (
        {"system": system, "chunks": ["one", "two"], "question": "?", "cache": cache}
        for system in ("Today", "Tomorrow")
    )
    found = keys("/v1/rag/chat", first, isolated)
    assert ticket_keys(Settings(chunk_scope="isolated"), **first) == found
    assert (keys("/v1/rag/chat", second, isolated) == found) == (cache != {"scope": "system"})
    messages = [{"role": "system", "content": "Today"}, USER]
    assert keys(CHAT, {"messages": messages, "documents": ["one", "two"], "cache": cache}, isolated) == found


@pytest.mark.parametrize("path", ["/v1/rag/chat", *EXTRACTORS])
@pytest.mark.parametrize("body", [{}, {"documents": 5}, {"chunks": [None]}, {"messages": 5, "documents": ["a"]}])
def test_nonsense_has_no_documents(path, body):
    assert wanted_documents(path, dict(body)) == []
    assert parse_body("/v1/embeddings", json.dumps(body).encode()) is None


PATHS = sorted(RAG_PATHS | EXTRACTORS.keys())


@given(st.sampled_from(PATHS), bodies, st.sampled_from([None, "##"]))
def test_any_object_has_documents_or_none(path, body, separator):
    parsed = parse_body(path, json.dumps(body).encode())
    assert parsed is None or all(each.tokens >= 0 for each in wanted_documents(path, parsed, Reading(separator)))


@given(st.sampled_from(PATHS), st.binary(max_size=50) | st.text().map(str.encode))
def test_any_bytes_are_an_object_or_nothing(path, body):
    parsed = parse_body(path, body)
    assert parsed is None or isinstance(wanted_documents(path, parsed, SEPARATED), list)


def test_many_chunks_behind_a_long_prompt_take_no_longer_than_they_should():
    with ends():
        assert len(rag(system="S" * 1_000_000, chunks=[f"chunk {i}" for i in range(20_000)])) == 20_000


SYSTEM = {"role": "system", "content": "S"}
FIRST, SECOND = {"role": "user", "content": "Hello."}, {"role": "user", "content": "And then?"}
ANSWER = {"role": "assistant", "content": "Hi."}


@pytest.mark.parametrize(
    ("one", "later"),
    [
        ({"messages": [SYSTEM, FIRST]}, {"messages": [SYSTEM, FIRST, ANSWER, SECOND]}),
        ({"input": [FIRST], "instructions": "S"}, {"input": [FIRST, ANSWER, SECOND], "instructions": "S"}),
        ({"prompt": "x" * 2000}, {"prompt": "x" * 2000 + "y"}),
        ({"prompt": [7] * 2000}, {"prompt": [7] * 2000 + [8]}),
    ],
)
def test_a_conversation_has_one_key_and_grows(one, later):
    (first,), (second,) = conversation_of(one), conversation_of(later)
    assert first.key == second.key
    assert second.tokens >= first.tokens
    assert not first.claims
    for other in ({"messages": [SYSTEM, SECOND]}, {"messages": [FIRST]}, {"prompt": "S"}):
        assert conversation_of(other) != conversation_of({"messages": [SYSTEM, FIRST]})
    assert conversation_of({"model": "n", "messages": [FIRST]}) != conversation_of({"messages": [FIRST]})


@given(json_values)
def test_any_object_is_a_conversation_or_none(value):
    for name in ("messages", "input", "prompt"):
        body = parse_body(CHAT, json.dumps({name: value}).encode())
        assert body is None or len(conversation_of(body)) <= 1
