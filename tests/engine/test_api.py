# SPDX-License-Identifier: Apache-2.0
"""The HTTP surface: reports, OpenAI's client, documents in every shape, streams, and errors."""

from collections.abc import Callable
from itertools import product
from typing import Any

import openai
import pytest

from tests.engine.server import TesseraServer, stream_events, token_logprobs
from tests.support.exactness import ask, segments

Text = Callable[[int], str]

CHATML = "<|im_start|>{role}\n{content}<|im_end|>\n"


@pytest.fixture
def client(server: TesseraServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def keys(report: dict[str, Any]) -> list[str]:
    return [chunk["key"] for chunk in report["chunks"]]


# Reports


def test_the_report_counts_what_the_engine_computed(server: TesseraServer, text: Text) -> None:
    system, chunks = f"System {text(10)}", [text(200), text(100)]
    question, shared = text(30), {"system": system}
    computed_before = server.metric("vllm:prompt_tokens_total") - server.metric("vllm:prompt_tokens_cached_total")
    cold = ask(server, "shared", chunks, question, **shared)["cache"]
    computed = server.metric("vllm:prompt_tokens_total") - server.metric("vllm:prompt_tokens_cached_total")
    system_ids, chunk_ids, question_ids = segments(cold)
    context = len(system_ids) + sum(map(len, chunk_ids))
    # This request computed the whole prompt; the system segment once, which the second fill request loads.
    prompt = context + len(question_ids)
    assert cold["tokens"] == {"prompt": prompt, "reused": 0, "computed": prompt, "fill_computed": context}
    assert computed - computed_before == cold["tokens"]["fill_computed"] + len(question_ids)
    warm = ask(server, "offset", chunks, question, **shared)["cache"]
    assert warm["tokens"]["computed"] == len(question_ids)
    assert warm["tokens"]["reused"] == warm["tokens"]["prompt"] - len(question_ids)
    assert set(warm["timings_ms"]) == {"plan", "fill", "queue", "first_token", "total"}
    assert warm["timings_ms"]["first_token"] <= warm["timings_ms"]["total"]


def test_explained_positions(server: TesseraServer, text: Text) -> None:
    chunks = [text(40), text(90)]
    positions = {}
    for strategy in ("shared", "offset"):
        report = ask(server, strategy, chunks, text(10))["cache"]
        system_ids, chunk_ids, _ = segments(report)
        start, lengths = len(system_ids), list(map(len, chunk_ids))
        positions[strategy] = [segment["position"] for segment in report["segments"]]
    assert positions["shared"] == [0, start, start, start + max(lengths)]
    assert positions["offset"] == [0, start, start + lengths[0], start + sum(lengths)]


def test_no_chunks_is_an_ordinary_chat(server: TesseraServer, text: Text) -> None:
    question = text(40)
    body = {"max_tokens": 4, "temperature": 0, "logprobs": True}
    rag = server.chat(system="System", chunks=[], question=question, **body)
    messages = [{"role": "system", "content": "System"}, {"role": "user", "content": question}]
    chat = server.post("/v1/chat/completions", {"messages": messages, **body})
    assert (rag["cache"]["mode"], rag["cache"]["reason"]) == ("full", "the request has no chunks")
    assert token_logprobs(rag) == pytest.approx(token_logprobs(chat), abs=1e-5)
    assert rag["usage"] == chat["usage"]


def test_a_stream_ends_with_the_report(server: TesseraServer, text: Text) -> None:
    body = {"chunks": [text(60)], "question": text(10), "max_tokens": 5, "temperature": 0}
    answer = server.post("/v1/rag/chat", body)
    events = stream_events(server, "/v1/rag/chat", body)
    streamed = "".join(c["delta"].get("content") or "" for event in events for c in event["choices"])
    assert streamed == answer["choices"][0]["message"]["content"]
    assert all(event["choices"] for event in events)  # many clients read choices[0] of every event
    assert events[-1]["cache"]["chunks"][0]["status"] == "hit"
    assert not any("cache" in event for event in events[:-1])


def test_conversations_keep_the_chunks_in_front(server: TesseraServer, text: Text) -> None:
    chunk = {"id": "doc-1", "title": "Title", "text": text(80), "metadata": {"page": 3}}
    first = server.chat(system="System", chunks=[chunk], question="Who?", max_tokens=2)
    turns = (("user", "Who?"), ("assistant", "Nobody."), ("user", "Why?"))
    messages = [{"role": role, "content": content} for role, content in turns]
    second = server.chat(system="System", chunks=[chunk], messages=messages, max_tokens=2)
    assert keys(second["cache"]) == keys(first["cache"])
    assert second["cache"]["chunks"][0] == {**first["cache"]["chunks"][0], "status": "hit"}
    assert second["cache"]["chunks"][0]["id"] == "doc-1"


# OpenAI's client, unchanged


def test_openai_chat(client: openai.OpenAI, server: TesseraServer) -> None:
    look = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    arguments: Any = {"model": server.model, "messages": [{"role": "user", "content": "Hello?"}], "max_tokens": 5}
    arguments |= {"temperature": 0, "tools": [look], "tool_choice": "none", "logprobs": True, "top_logprobs": 2}
    answer = client.chat.completions.create(**arguments)
    assert answer.choices[0].logprobs is not None
    assert len(answer.choices[0].logprobs.content or []) == 5
    chunks = list(client.chat.completions.create(**arguments, stream=True, stream_options={"include_usage": True}))
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert streamed == answer.choices[0].message.content
    # Not equal in cached tokens: the second request finds the first one's in vLLM's prefix cache.
    told, streamed_told = (
        each.usage.model_copy(update={"prompt_tokens_details": None}) for each in (answer, chunks[-1])
    )
    assert streamed_told == told


def test_openai_completions(client: openai.OpenAI, server: TesseraServer) -> None:
    arguments: Any = {"model": server.model, "prompt": "Once upon", "max_tokens": 5, "temperature": 0, "logprobs": 1}
    answer = client.completions.create(**arguments)
    streamed = "".join(chunk.choices[0].text for chunk in client.completions.create(**arguments, stream=True))
    assert streamed == answer.choices[0].text
    assert answer.choices[0].logprobs is not None
    assert "kv_transfer_params" not in (answer.model_extra or {}) or answer.model_extra["kv_transfer_params"] is None


def test_openai_client_with_documents(client: openai.OpenAI, server: TesseraServer, text: Text) -> None:
    arguments: Any = {"model": server.model, "messages": [{"role": "user", "content": "What?"}], "max_tokens": 4}
    arguments |= {"temperature": 0, "extra_body": {"documents": [{"text": text(60)}]}}
    answer = client.chat.completions.create(**arguments)
    assert answer.model_extra is not None
    assert answer.model_extra["kv_transfer_params"]["cache"]["mode"] == "chunked"
    events = list(client.chat.completions.create(**arguments, stream=True))
    assert events[-1].model_extra["kv_transfer_params"]["cache"]["chunks"][0]["status"] == "hit"


def test_models_and_metrics_are_vllms(client: openai.OpenAI, server: TesseraServer) -> None:
    assert [model.id for model in client.models.list()] == [server.model]
    assert server.client.get("/health").status_code == 200
    assert "vllm:num_requests_running" in server.client.get("/metrics").text
    paths = server.client.get("/openapi.json").json()["paths"]
    assert {"/v1/rag/chat", "/v1/cache/stats", "/v1/chat/completions"} <= set(paths)


# Documents on vLLM's endpoints


def same_request(text: Text) -> dict[str, Any]:
    return {"system": f"System {text(10)}", "chunks": [text(60), text(90)], "question": "What is it?"}


COMMON: dict[str, Any] = {"max_tokens": 6, "temperature": 0, "cache": {"explain": True}}


def assert_same(report: dict[str, Any], answer: str, cached_tokens: int, expected: dict[str, Any]) -> None:
    """Same layout, keys and answer as the same request to `/v1/rag/chat`; usage tells the reused tokens."""
    assert cached_tokens == report["tokens"]["reused"] > 0
    assert report["mode"] == "chunked"
    assert report["segments"] == expected["cache"]["segments"]
    assert keys(report) == keys(expected["cache"])
    assert answer == expected["choices"][0]["message"]["content"]


@pytest.mark.parametrize("shape", ["cohere", "strings"])
def test_documents_of_chat_completions(shape: str, server: TesseraServer, text: Text) -> None:
    request = same_request(text)
    documents: Any = request["chunks"]
    if shape == "cohere":
        documents = [{"id": f"d{i}", "data": {"title": "T", "snippet": chunk}} for i, chunk in enumerate(documents)]
        request["chunks"] = [{"id": d["id"], "title": "T", "text": d["data"]["snippet"]} for d in documents]
    expected = server.chat(**request, **COMMON)
    messages = [{"role": "system", "content": request["system"]}, {"role": "user", "content": request["question"]}]
    response = server.post("/v1/chat/completions", {"messages": messages, "documents": documents, **COMMON})
    usage, report = response["usage"], response["kv_transfer_params"]["cache"]
    cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
    assert_same(report, response["choices"][0]["message"]["content"], cached_tokens, expected)
    assert expected["usage"]["prompt_tokens_details"]["cached_tokens"] == expected["cache"]["tokens"]["reused"]
    # Not equal in cached tokens: the first request has computed the chunks.
    assert {**usage, "prompt_tokens_details": None} == {**expected["usage"], "prompt_tokens_details": None}
    ids = [chunk["id"] for chunk in response["kv_transfer_params"]["cache"]["chunks"]]
    assert ids == (["d0", "d1"] if shape == "cohere" else [None, None])


def test_documents_of_responses(server: TesseraServer, text: Text) -> None:
    request = same_request(text)
    expected = server.chat(**request, **COMMON)
    body = {"instructions": request["system"], "input": request["question"], "max_output_tokens": 6, "temperature": 0}
    body |= {"documents": [{"text": chunk} for chunk in request["chunks"]], "cache": {"explain": True}}
    response = server.post("/v1/responses", body)
    answer = response["output"][-1]["content"][0]["text"]
    cached_tokens = response["usage"]["input_tokens_details"]["cached_tokens"]
    assert_same(response["kv_transfer_params"]["cache"], answer, cached_tokens, expected)


def anthropic_body(request: dict[str, Any], model: str) -> dict[str, Any]:
    plain, listed = request["chunks"]
    content = [
        {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": plain}},
        {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": listed}]}},
        {"type": "text", "text": request["question"]},
    ]
    asked = {"model": model, "system": request["system"], "messages": [{"role": "user", "content": content}]}
    return {**asked, "max_tokens": 6, "temperature": 0}


def test_documents_of_anthropic_messages(server: TesseraServer, text: Text) -> None:
    request = same_request(text)
    expected = server.chat(**request, **COMMON)
    body = anthropic_body(request, server.model)
    response = server.post("/v1/messages", {**body, "cache": {"explain": True}})
    cached_tokens = response["usage"]["cache_read_input_tokens"]
    assert_same(response["kv_transfer_params"]["cache"], response["content"][0]["text"], cached_tokens, expected)
    body = {**anthropic_body(same_request(text), server.model), "stream": True}
    with server.client.stream("POST", "/v1/messages", json=body) as response:
        lines = [line for line in response.iter_lines() if "message_stop" in line and line.startswith("data: ")]
    assert len(lines) == 1
    assert '"cache"' in lines[0]


@pytest.mark.parametrize("by", [pytest.param("flag", marks=pytest.mark.matrix), "field"])
def test_separators(by: str, server: TesseraServer, serve: Any, text: Text) -> None:
    target = serve("tiny-llama", "--chunk-separator", " # # ") if by == "flag" else server
    request = same_request(text)
    expected = target.chat(**request, **COMMON)
    separator = " # # " if by == "flag" else "\n##\n"
    cache = {"explain": True} if by == "flag" else {"explain": True, "separator": separator}
    joined = separator.join([*request["chunks"], request["question"]])
    messages = [{"role": "system", "content": request["system"]}, {"role": "user", "content": joined}]
    body = {"messages": messages, **COMMON, "cache": cache}
    response = target.post("/v1/chat/completions", body)
    cached_tokens = response["usage"]["prompt_tokens_details"]["cached_tokens"]
    answer = response["choices"][0]["message"]["content"]
    assert_same(response["kv_transfer_params"]["cache"], answer, cached_tokens, expected)
    opening = CHATML.format(role="system", content=request["system"]) + "<|im_start|>user\n"
    closing = f"{request['question']}<|im_end|>\n<|im_start|>assistant\n"
    prompt = separator.join([opening, *request["chunks"], closing])
    completion = target.post("/v1/completions", {"prompt": prompt, **COMMON, "cache": cache})
    cached_tokens = completion["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert_same(completion["kv_transfer_params"]["cache"], completion["choices"][0]["text"], cached_tokens, expected)


# Bad requests get a JSON error in OpenAI's format that names the field, and have no effect


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


def test_what_a_request_is_refused_for(server: TesseraServer, text: Text) -> None:
    body = {"chunks": [text(5000), text(4000)], "question": "What?"}
    error = server.post("/v1/rag/chat", body, status=400)["error"]
    assert "chunk 0: 5002, chunk 1: 4002, question:" in error["message"]
    assert "8192" in error["message"]
    assert error["param"] == "chunks"
    body = {"messages": [{"role": "user", "content": "What?"}], "max_tokens": 1, "stream_interval": "9" * 40}
    assert "64 bits" in server.post("/v1/chat/completions", body, status=400)["error"]["message"]
    body = {"model": "nobody/nothing", "chunks": ["a"], "question": "b"}
    error = server.post("/v1/rag/chat", body, status=404)["error"]
    assert "nobody/nothing" in error["message"]
    assert error["param"] == "model"


def test_a_grammar_that_takes_too_long_is_refused_and_keeps_nobody_waiting(server: TesseraServer) -> None:
    """The engine would compile it for minutes, and nobody's else meanwhile."""
    body = {"chunks": ["some text"], "question": "What?", "max_tokens": 2}
    costly = {"grammar": f"root ::= {'a ' * 4000}\na ::= {'[^x]*' * 1000}"}
    error = server.post("/v1/rag/chat", {**body, "structured_outputs": costly}, status=400)["error"]
    assert error["param"] == "structured_outputs"
    assert "it can't be compiled in 2 s" in error["message"]
    answer = server.chat(**body, structured_outputs={"choice": ["a"]})
    assert answer["choices"][0]["message"]["content"] == "a"


def test_max_tokens_default_to_what_is_left(server: TesseraServer, text: Text) -> None:
    response = server.chat(chunks=[text(8100)], question="What?", temperature=0, ignore_eos=True)
    assert response["usage"]["total_tokens"] == 8192


@pytest.mark.parametrize(
    ("path", "content"),
    [*product([*CHATS, *OURS], NO_OBJECT), *product(CHATS, [b"", b"\xff", b"[" * 100_000])],
)
def test_malformed_bodies(path: str, content: bytes, server: TesseraServer) -> None:
    headers = {"content-type": "application/json"}
    response = server.client.post(path, content=content, headers=headers)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == 400
