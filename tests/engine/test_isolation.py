# SPDX-License-Identifier: Apache-2.0
"""Composed KV never reaches ordinary traffic, another layout, another namespace or another strategy."""

import threading
from typing import Any

import pytest

from tests.engine.server import TesseraServer, token_logprobs
from tests.support.completions import all_tokens, complete
from tests.support.exactness import ask, assert_exact, segments


@pytest.fixture
def stock(serve: Any) -> TesseraServer:
    """The same engine without the connector."""
    return serve("tiny-llama", "--no-chunk-cache")


@pytest.mark.parametrize("strategy", [pytest.param("shared", marks=pytest.mark.matrix), "offset"])
def test_ordinary_requests_get_ordinary_answers(strategy, server, stock, oracle, text):
    """Tokens of a RAG request as an ordinary request before, during and after it."""
    chunks, question = [text(300), text(200), text(140)], text(60)
    explained = ask(server, strategy, [*chunks], question, cache={"mode": "full"})
    token_ids = all_tokens(explained["cache"])
    expected = complete(stock, token_ids)
    before = complete(server, token_ids)
    stop, failures = threading.Event(), []

    def keep_asking() -> None:
        while not stop.is_set():
            response = ask(server, strategy, chunks, question)
            if response["cache"]["mode"] != "chunked":
                failures.append(response["cache"])

    thread = threading.Thread(target=keep_asking)
    thread.start()
    try:
        during = [complete(server, token_ids) for _ in range(5)]
    finally:
        stop.set()
        thread.join()
    after = complete(server, token_ids)
    for logprobs in (before, *during, after):
        assert logprobs == pytest.approx(expected, abs=1e-5)
    assert not failures
    assert_exact(ask(server, strategy, chunks, question), oracle("tiny-llama"), strategy)


@pytest.mark.parametrize("strategy", [pytest.param("shared", marks=pytest.mark.matrix), "offset"])
def test_ordinary_requests_after_composed_ones(strategy, server, stock, text):
    """Composed blocks are in vLLM's prefix cache before any ordinary request has computed the same tokens."""
    for _ in range(2):
        report = ask(server, strategy, [text(300), text(200)], text(60))["cache"]
        assert complete(server, all_tokens(report)) == pytest.approx(complete(stock, all_tokens(report)), abs=1e-5)


def test_the_prefix_cache_never_crosses_layouts(server, oracle, text):
    """Equal token sequences under other boundaries, strategies and namespaces share no composed block."""
    a, b = text(254), text(254)
    question = text(150)
    joined = ask(server, "shared", [a, b], question)
    # One chunk with both chunks' text: the same tokens in another layout.
    merged = ask(server, "shared", [f"{a}\n\n{b}"], question)
    assert all_tokens(merged["cache"]) == all_tokens(joined["cache"])
    offset = ask(server, "offset", [a, b], question)
    elsewhere = ask(server, "shared", [a, b], question, cache={"namespace": "elsewhere"})
    num_question = len(segments(joined["cache"])[2])
    for response, strategy in ((joined, "shared"), (merged, "shared"), (offset, "offset"), (elsewhere, "shared")):
        assert_exact(response, oracle("tiny-llama"), strategy)
        # The whole question was computed. (A fill is plain causal attention, and may hit truly equal prefixes.)
        filled = sum(c["tokens"] for c in response["cache"]["chunks"] if c["status"] == "filled")
        tokens = response["cache"]["tokens"]
        assert tokens["computed"] >= num_question + min(filled, tokens["fill_computed"])
    assert [c["status"] for c in elsewhere["cache"]["chunks"]] == ["filled", "filled"]
    assert token_logprobs(joined) == pytest.approx(token_logprobs(elsewhere), abs=1e-5)
    assert max(abs(x - y) for x, y in zip(token_logprobs(joined), token_logprobs(merged), strict=True)) > 1e-3


def test_a_cache_salt_is_a_namespace_of_its_own(server, text):
    chunk = text(100)
    statuses = []
    for salt in ("tenant-a", "tenant-b", "tenant-a"):
        response = ask(server, "shared", [chunk], text(10), cache_salt=salt)
        statuses.append(response["cache"]["chunks"][0]["status"])
    assert statuses == ["filled", "filled", "hit"]


@pytest.mark.usefixtures("server")  # `stock` runs beside it in all tests of this file, and so starts once
def test_without_the_cache_there_are_no_chunks_to_manage(stock):
    off = "the chunk cache is off: switched off by --chunk-cache off"
    assert stock.post("/v1/rag/chunks", {"chunks": ["a"]}, 409)["error"]["message"] == off
    assert stock.get("/v1/rag/chunks", 409)["error"]["message"] == off
    for method in ("GET", "DELETE"):
        assert stock.client.request(method, f"/v1/rag/chunks/{'f' * 32}").status_code == 409
    assert stock.post("/v1/cache/clear", {}) == {"cleared": 0}
    body = {"chunks": ["a"], "question": "?", "max_tokens": 1}
    plan = stock.post("/v1/rag/plan", body)
    assert plan == {"mode": "full", "reason": "switched off by --chunk-cache off"}
    assert stock.chat(**body)["cache"]["reason"] == plan["reason"]
    by_id = {**body, "chunks": [{"id": "a"}]}
    for path in ("/v1/rag/chat", "/v1/rag/plan"):
        assert "the chunk cache is off" in stock.post(path, by_id, 404)["error"]["message"]


def test_clients_cannot_send_transfer_plans(server):
    plan = {"tessera": {"loads": [[0, 8, 0, 1, [0]]], "saves": []}}
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1, "kv_transfer_params": plan}
    error = server.post("/v1/chat/completions", body, status=400)["error"]
    assert error["param"] == "kv_transfer_params"
    # vLLM's path for rejected requests of a prefill/decode split has no effect either.
    rejected = {"do_remote_prefill": True, "tessera": {"loads": 3}}
    server.post("/v1/chat/completions", {**body, "max_tokens": -5, "kv_transfer_params": rejected}, status=400)
    assert server.chat(chunks=["still here"], question="?", max_tokens=1)["cache"]["mode"] == "chunked"
