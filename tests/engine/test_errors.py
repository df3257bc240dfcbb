# SPDX-License-Identifier: Apache-2.0
"""Bad requests get a JSON error in OpenAI's format that names the field, and have no effect."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest

from tests.engine.server import TesseraServer

Text = Callable[[int], str]


NO_JSON = [b"{", b"\xff\xfe", b"", b"\xff", b"[" * 100_000]
NO_OBJECT = [b"[]", b'"text"']
BAD_REQUESTS = [
    ({"chunks": [""]}, "chunks.0"),
    ({"chunks": ["a", "  \n"]}, "chunks.1"),
    ({"chunks": [{"text": ""}]}, "chunks.0"),
    ({"chunks": [{"title": "no text"}]}, "chunks.0.text"),
    ({"chunks": "text"}, "chunks"),
    ({"chunks": [1]}, "chunks.0"),
    ({"chunks": [{"text": "a", "colour": "red"}]}, "chunks.0"),
    ({"question": ""}, "question"),
    ({"question": None}, "question"),
    ({"messages": [{"role": "user", "content": "x"}]}, "question"),
    ({"question": None, "messages": []}, "messages"),
    ({"question": None, "messages": [{"role": "assistant", "content": "x"}]}, "messages"),
    ({"system": 3}, "system"),
    ({"colour": "red"}, "colour"),
    ({"documents": []}, "documents"),
    ({"kv_transfer_params": {}}, "kv_transfer_params"),
    ({"cache": {"mode": "fast"}}, "cache.mode"),
    ({"cache": {"position_strategy": "none"}}, "cache.position_strategy"),
    ({"cache": {"scope": "global"}}, "cache.scope"),
    ({"cache": {"namespace": ""}}, "cache.namespace"),
    ({"cache": {"namespace": "a\0b"}}, "cache.namespace"),
    ({"cache": {"colour": 1}}, "cache.colour"),
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
    [
        *product(["/v1/rag/chat", "/v1/chat/completions"], NO_JSON + NO_OBJECT),
    ],
)
def test_malformed_bodies(path: str, content: bytes, server: TesseraServer) -> None:
    headers = {"content-type": "application/json"}
    response = server.client.post(path, content=content, headers=headers)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == 400


@pytest.mark.parametrize(
    ("path", "body", "parameter"),
    [
        ("/v1/chat/completions", {"documents": [{"title": "x"}]}, "documents.0"),
        ("/v1/chat/completions", {"documents": "x"}, "documents"),
        ("/v1/chat/completions", {"documents": [{"text": " "}]}, "documents.0.text"),
        ("/v1/chat/completions", {"documents": ["x"], "cache": {"mode": "no"}}, "cache.mode"),
        ("/v1/chat/completions", {"documents": ["x"], "echo": True}, "echo"),
        ("/v1/completions", {"prompt": "x", "documents": ["x"]}, "documents"),
    ],
)
def test_bad_documents(path: str, body: dict[str, Any], parameter: str, server: TesseraServer) -> None:
    messages = [{"role": "user", "content": "hello"}]
    error = server.post(path, {"messages": messages, "max_tokens": 1, **body}, status=400)["error"]
    assert error["param"] == parameter
