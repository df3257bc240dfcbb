# SPDX-License-Identifier: Apache-2.0
"""Tenants share only the engine: no hit, list or deletion across tenants, and no trace in metrics or logs."""

import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from tests.engine.server import TesseraServer
from tests.support.tenants import KEYS, LIMITED, key_of, tenants_file

JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def tenants(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tenants_file(tmp_path_factory.mktemp("tenants"))


@pytest.fixture
def server(serve: Any, tenants: str) -> TesseraServer:
    server = serve("tiny-llama", "--tenants", tenants, environment={"TESSERA_LOG_LEVEL": "INFO"})
    server.client.headers.update(key_of("root"))
    return server


@contextmanager
def acting(server: TesseraServer, name: str) -> Any:
    """The server's client with this tenant's key."""
    server.client.headers.update(key_of(name))
    try:
        yield server
    finally:
        server.client.headers.update(key_of("root"))


def ask(server: TesseraServer, name: str, chunks: list[Any], **fields: Any) -> list[str]:
    """Statuses of the chunks."""
    with acting(server, name):
        answer = server.chat(chunks=chunks, question="and", max_tokens=2, temperature=0, ignore_eos=True, **fields)
    assert answer["cache"]["mode"] == "chunked"
    return [chunk["status"] for chunk in answer["cache"]["chunks"]]


def num_cached(server: TesseraServer, name: str, prompt: str, **fields: Any) -> int:
    """Tokens of an ordinary prompt that hit vLLM's prefix cache."""
    with acting(server, name):
        body = {"model": server.model, "prompt": prompt, "max_tokens": 2, **fields}
        usage = server.post("/v1/completions", body)["usage"]
    return (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0


def error(server: TesseraServer, name: str, method: str, path: str, **fields: Any) -> tuple[int, dict[str, Any]]:
    with acting(server, name):
        response = server.client.request(method, path, **fields)
    return response.status_code, response.json().get("error", {})


def test_chunks_are_the_tenants_own_but_in_a_namespace_that_both_keys_open(server, text):
    document = text(200)
    assert ask(server, "acme", [document]) == ["filled"]
    assert ask(server, "beta", [document]) == ["filled"]
    assert ask(server, "acme", [document]) == ask(server, "beta", [document]) == ["hit"]
    document, public = text(200), {"namespace": "public"}
    assert ask(server, "acme", [document], cache=public) == ["filled"]
    assert ask(server, "beta", [document], cache=public) == ["hit"]
    body = {"chunks": [text(200)], "question": "and"}
    ask(server, "acme", body["chunks"])
    with acting(server, "beta"):
        theirs = server.post("/v1/rag/plan", body)
    with acting(server, "acme"):
        own = server.post("/v1/rag/plan", body)
    assert [chunk["status"] for chunk in theirs["chunks"]] != [chunk["status"] for chunk in own["chunks"]]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/rag/chat", {"chunks": ["one"], "question": "and"}),
        ("/v1/rag/plan", {"chunks": ["one"], "question": "and"}),
        ("/v1/rag/chunks", {"chunks": ["one"]}),
        ("/v1/chat/completions", {"documents": ["one"], "messages": [{"role": "user", "content": "and"}]}),
    ],
)
def test_no_tenant_names_anothers_namespace(path, body, server):
    status, said = error(server, "beta", "POST", path, json={**body, "cache": {"namespace": "acme"}})
    assert (status, said.get("param")) == (400, "cache.namespace"), said
    assert "this API key does not open the namespace 'acme'" in said["message"]


def test_ids_are_the_tenants_own(server, text):
    with acting(server, "acme"):
        server.ingest([{"id": "contract", "text": text(100)}])
    assert ask(server, "acme", [{"id": "contract"}]) == ["hit"]
    body = {"chunks": [{"id": "contract"}], "question": "and"}
    assert error(server, "beta", "POST", "/v1/rag/chat", json=body)[0] == 404
    with acting(server, "beta"):  # another text under the same id is no conflict
        lines, _ = server.ingest([{"id": "contract", "text": text(90)}])
    assert [line["status"] for line in lines] == ["filled"]


def test_anothers_chunks_can_be_neither_listed_nor_changed_nor_dropped(server, text):
    with acting(server, "acme"):
        (line,), _ = server.ingest([text(100)])
        keys = {entry["key"] for entry in server.get("/v1/rag/chunks", limit=1000, namespace="acme")["data"]}
    assert line["key"] in keys
    with acting(server, "beta"):
        shown = server.get("/v1/rag/chunks", limit=1000)["data"]
    assert not keys & {entry["key"] for entry in shown}
    assert {entry["namespace"] for entry in shown} <= {"beta", "public"}
    path = f"/v1/rag/chunks/{line['key']}"
    unknown = error(server, "beta", "GET", f"/v1/rag/chunks/{'00' * 16}")
    for method, fields in (("GET", {}), ("DELETE", {}), ("PATCH", {"json": {"pinned": True}})):
        status, said = error(server, "beta", method, path, **fields)
        assert (status, said["message"].replace(line["key"], "00" * 16)) == (unknown[0], unknown[1]["message"])
    with acting(server, "acme"):
        assert server.get(path)["pinned"] is False


def test_administrators_see_everything(server, text):
    with acting(server, "acme"):
        (line,), _ = server.ingest([text(100)])
    assert server.get(f"/v1/rag/chunks/{line['key']}")["namespace"] == "acme"
    assert server.post("/v1/cache/clear", {"namespace": "acme"})["cleared"] >= 1
    server.get(f"/v1/rag/chunks/{line['key']}", status=404)


def test_vllms_prefix_cache_is_the_tenants_own(server, text):
    """Otherwise timing would reveal other tenants' prompts."""
    prompt = text(300)
    assert num_cached(server, "acme", prompt) == 0
    assert num_cached(server, "acme", prompt) > 0
    assert num_cached(server, "beta", prompt) == 0
    assert num_cached(server, "beta", prompt, cache_salt="own") == 0
    assert num_cached(server, "beta", prompt, cache_salt="own") > 0
    prompt = text(300)
    num_cached(server, "acme", prompt)
    for salt in ("acme", "default"):
        assert num_cached(server, "beta", prompt, cache_salt=salt) == 0
    chunks, fields = [text(300)], {"question": "and", "max_tokens": 2, "cache": {"mode": "full"}}
    with acting(server, "acme"):
        server.chat(chunks=chunks, **fields)
        again = server.chat(chunks=chunks, **fields)
    with acting(server, "beta"):
        theirs = server.chat(chunks=chunks, **fields)
    assert again["cache"]["tokens"]["reused"] > 0
    assert theirs["cache"]["tokens"]["reused"] == 0


def test_all_that_vllm_serves_is_behind_the_door(server):
    paths = {path.replace("{", "").replace("}", "") for path in server.get("/openapi.json")["paths"]}
    assert {"/v1/chat/completions", "/v1/models", "/metrics", "/tokenize"} <= paths | {"/metrics"}
    is_open = {"/health", "/ping", "/ready", "/readyz"}
    for path in sorted((paths | {"/metrics", "/docs", "/openapi.json", "/reset_prefix_cache"}) - is_open):
        for method in ("GET", "POST"):
            response = server.client.request(method, path, headers={"authorization": ""})
            assert response.status_code == 401, (method, path)


def test_a_tenant_that_has_its_share_of_the_pool_gives_up_its_own(server, text):
    document = text(60)
    assert ask(server, "acme", [document]) == ["filled"]
    with acting(server, "tiny"):
        _, summary = server.ingest([text(60) for _ in range(10)])
        kept = server.get("/v1/rag/chunks")["data"]
    assert (summary["filled"], summary["failed"]) == (10, 0)
    assert len(kept) == 3
    assert ask(server, "acme", [document]) == ["hit"]


def test_a_tenant_that_has_used_up_its_tokens_waits(server, text):
    body = {"model": server.model, "prompt": text(300), "max_tokens": 2}
    with acting(server, LIMITED[0]):
        server.post("/v1/completions", body)
    status, said = error(server, LIMITED[0], "POST", "/v1/completions", json=body)
    assert (status, said["reason"]) == (429, "limit_exceeded")
    num_cached(server, "acme", text(300))


@pytest.mark.parametrize(
    ("name", "path", "more"),
    [
        (LIMITED[1], "/v1/completions", {"prompt": "{text}"}),
        (LIMITED[2], "/v1/rag/chat", {"chunks": ["{text}"], "question": "Why?"}),
        (LIMITED[3], "/v1/rag/plan", {"chunks": ["{text}"], "question": "Why?", "prefetch": True}),
    ],
)
def test_of_requests_at_once_one_runs_into_debt(server, text, name, path, more):
    """Each may start while tokens are left, which only the first takes."""
    asked = json.dumps({"model": server.model, "max_tokens": 2, **more})
    bodies = [asked.replace("{text}", text(300)) for _ in range(6)]
    with acting(server, name), ThreadPoolExecutor(6) as threads:
        answers = list(threads.map(lambda body: server.client.post(path, content=body, headers=JSON), bodies))
    assert Counter(answer.status_code for answer in answers) == {200: 1, 429: 5}
    for answer in answers:
        assert (answer.status_code == 200) != ("retry-after" in answer.headers)


@pytest.mark.parametrize(
    ("name", "path", "more"),
    [
        (LIMITED[4], "/v1/rag/chat", {"chunks": [{"text": "a", "context": "{text}"}], "question": "Why?"}),
        (
            LIMITED[5],
            "/v1/rag/plan",
            {"chunks": [{"text": "a", "context": "{text}"}], "question": "Why?", "prefetch": True},
        ),
        (LIMITED[6], "/v1/rag/chunks", {"chunks": [{"text": "a", "context": "{text}"}]}),
        (LIMITED[7], "/v1/rag/chunks", {"chunks": ["a"], "system": "{text}"}),
        (LIMITED[8], "/v1/completions", {"prompt": "a", "n": 64, "max_tokens": 8, "ignore_eos": True}),
        (LIMITED[9], "/v1/completions", {"prompt": "a", "max_tokens": 400, "ignore_eos": True, "stream": True}),
    ],
)
def test_all_that_is_computed_is_charged(server, text, name, path, more):
    """Contexts, system prompts, further answers and streams, too."""
    body = json.dumps({"model": server.model, **more}).replace("{text}", text(400))
    with acting(server, name):
        assert server.client.post(path, content=body, headers=JSON).status_code == 200
        again = server.client.post("/v1/completions", json={"model": server.model, "prompt": "a", "max_tokens": 1})
    assert again.status_code == 429
    assert int(again.headers["retry-after"]) > 60


def test_a_stream_that_has_begun_says_that_its_tenants_tokens_are_used_up(server, text):
    """vLLM begins streams of responses before it asks the engine; the log has no traceback of a refusal."""
    bodies = [{"model": server.model, "input": text(300), "max_output_tokens": 2, "stream": True} for _ in range(6)]
    begun = server.log.stat().st_size
    with acting(server, LIMITED[10]), ThreadPoolExecutor(6) as threads:
        answers = list(threads.map(lambda body: server.client.post("/v1/responses", json=body), bodies))
    refused = [each for each in answers if '"reason":"limit_exceeded"' in each.text.replace(" ", "")]
    (answered,) = [each for each in answers if each not in refused]
    assert "event: response.completed" in answered.text
    assert any(each.status_code == 200 and "event: error" in each.text for each in refused)
    assert "Traceback" not in server.log.read_bytes()[begun:].decode()


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": ["a", "b", "c"]},
        {"prompt": ["a", "b", "c"], "stream": True},
        {"prompt": [[1, 2], [3, 4], [5, 6]]},
        {"prompt": "a", "n": 3},
        {"prompt": ["a", "b"], "n": 2},
        {"prompt": "a", "n": 3, "use_beam_search": True},
    ],
)
def test_each_prompt_and_each_answer_counts_among_those_that_run_at_once(server, fields):
    asked = {"model": server.model, "max_tokens": 2}
    status, said = error(server, "two", "POST", "/v1/completions", json={**asked, **fields})
    assert (status, said["reason"]) == (429, "limit_exceeded")
    assert "its limit is 2" in said["message"]
    status, said = error(server, "two", "POST", "/v1/completions", json={**asked, "prompt": ["a", "b"]})
    assert status == 200, said  # what was refused has left its places


def test_each_prompt_counts_among_the_requests_of_a_minute(server):
    asked = {"model": server.model, "max_tokens": 2}
    with acting(server, "three"):
        answer = server.client.post("/v1/completions", json={**asked, "prompt": ["a", "b", "c"]})
        assert answer.status_code == 200
        again = server.client.post("/v1/completions", json={**asked, "prompt": "a"})
    assert (again.status_code, again.json()["error"]["reason"]) == (429, "limit_exceeded")
    assert "requests per minute are used up" in again.json()["error"]["message"]


def test_no_more_answers_than_run_at_once(server):
    body = {"model": server.model, "prompt": "a", "n": 16_384, "max_tokens": 1}
    status, said = error(server, "acme", "POST", "/v1/completions", json=body)
    assert (status, said["reason"]) == (400, "bad_request")
    assert "answers run at once" in said["message"]


def test_neither_metrics_nor_log_tell_of_tenants_and_documents(server, text):
    secret = text(200)
    ask(server, "acme", [{"text": secret, "title": "secret-title"}])
    error(server, "beta", "POST", "/v1/rag/chat", json={"chunks": [secret], "question": ""})
    metrics, log = server.client.get("/metrics").text, server.log.read_text()
    for words in (secret, "secret-title", *KEYS.values()):
        assert words not in metrics
        assert words not in log
    assert "acme" not in metrics
