# SPDX-License-Identifier: Apache-2.0
"""Bad requests get a JSON error in OpenAI's format that names the field, and have no effect."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest

from tests.engine.server import TesseraServer

Text = Callable[[int], str]


OURS = ["/v1/rag/chunks", "/v1/rag/plan", "/v1/cache/clear"]
CHATS = ["/v1/rag/chat", "/v1/chat/completions"]
NO_OBJECT = [b"{", b"\xff\xfe", b"[]", b'"text"']
BAD_REQUESTS = [
    ({"chunks": ["a", "  \n"]}, "chunks.1"),
    ({"chunks": "text"}, "chunks"),
    ({"chunks": [1]}, "chunks.0"),
    ({"chunks": [{"text": "a", "colour": "red"}]}, "chunks.0"),
    ({"question": ""}, "question"),
    ({"question": None, "messages": []}, "messages"),
    ({"system": 3}, "system"),
    ({"colour": "red"}, "colour"),
    ({"kv_transfer_params": {}}, "kv_transfer_params"),
    ({"cache": {"mode": "fast"}}, "cache.mode"),
    ({"cache": {"namespace": "a\0b"}}, "cache.namespace"),
    ({"temperature": "hot"}, "temperature"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 9000}, "max_tokens"),
    ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
]


@pytest.mark.parametrize(("fields", "parameter"), BAD_REQUESTS)
def test_bad_requests_name_the_field(fields: dict[str, Any], parameter: str, server: TesseraServer) -> None:
    body = {"chunks": ["some text"], "question": "What?", "max_tokens": 2, **fields}
    error = server.post("/v1/rag/chat", body, status=400)["error"]
    assert set(error) >= {"message", "type", "param", "code"}
    assert parameter in error["param"], error


def test_a_prompt_too_long_names_its_segments(server: TesseraServer, text: Text) -> None:
    body = {"chunks": [text(5000), text(4000)], "question": "What?"}
    error = server.post("/v1/rag/chat", body, status=400)["error"]
    assert "chunk 0: 5002, chunk 1: 4002, question:" in error["message"]
    assert "8192" in error["message"]
    assert error["param"] == "chunks"


def test_a_grammar_that_takes_too_long_is_refused_and_keeps_nobody_waiting(server: TesseraServer) -> None:
    """The engine would compile it for minutes, and nobody's else meanwhile."""
    body = {"chunks": ["some text"], "question": "What?", "max_tokens": 2}
    costly = {"grammar": f"root ::= {'a ' * 4000}\na ::= {'[^x]*' * 1000}"}
    error = server.post("/v1/rag/chat", {**body, "structured_outputs": costly}, status=400)["error"]
    assert error["param"] == "structured_outputs"
    assert "it can't be compiled in 2 s" in error["message"]
    answer = server.chat(**body, structured_outputs={"choice": ["a"]})
    assert answer["choices"][0]["message"]["content"] == "a"


def test_integers_that_the_engine_cant_be_sent_are_refused_as_text_too(server: TesseraServer) -> None:
    body = {"messages": [{"role": "user", "content": "What?"}], "max_tokens": 1, "stream_interval": "9" * 40}
    assert "64 bits" in server.post("/v1/chat/completions", body, status=400)["error"]["message"]


def test_max_tokens_default_to_what_is_left(server: TesseraServer, text: Text) -> None:
    response = server.chat(chunks=[text(8100)], question="What?", temperature=0, ignore_eos=True)
    assert response["usage"]["total_tokens"] == 8192


def test_unknown_model(server: TesseraServer) -> None:
    body = {"model": "nobody/nothing", "chunks": ["a"], "question": "b"}
    error = server.post("/v1/rag/chat", body, status=404)["error"]
    assert "nobody/nothing" in error["message"]
    assert error["param"] == "model"


@pytest.mark.parametrize(
    ("path", "content"),
    [*product([*CHATS, *OURS], NO_OBJECT), *product(CHATS, [b"", b"\xff", b"[" * 100_000])],
)
def test_malformed_bodies(path: str, content: bytes, server: TesseraServer) -> None:
    headers = {"content-type": "application/json"}
    response = server.client.post(path, content=content, headers=headers)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == 400
