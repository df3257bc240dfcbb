# SPDX-License-Identifier: Apache-2.0
"""Chunks computed behind text of their document that is no part of the prompt: exact, and never mixed up."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.engine.server import TesseraServer
from tests.support.exactness import ask, assert_exact, contexts_of, statuses

Text = Callable[[int], str]


@pytest.mark.parametrize("strategy", ["offset", "shared", "parallel"])
def test_computed_and_cached_in_other_orders(strategy: str, server: TesseraServer, oracle: Any, text: Text) -> None:
    before, own = text(90), [text(n) for n in (50, 130, 25)]
    chunks: list[Any] = [{"text": own[0], "context": before}, {"text": own[1]}, {"text": own[2], "context": own[1]}]
    for status, order in (("filled", chunks), ("hit", chunks[::-1]), ("hit", [chunks[1], chunks[0], chunks[2]])):
        response = ask(server, strategy, order, text(12))
        assert statuses(response) == [status] * 3
        assert [bool(each) for each in contexts_of(response["cache"]) or []] == ["context" in each for each in order]
        assert_exact(response, oracle("tiny-llama"), strategy)


def test_the_same_text_behind_another_context_is_another_chunk_and_its_last_512_tokens_count(
    server: TesseraServer, oracle: Any, text: Text
) -> None:
    chunk, other, question = text(60), text(40), text(9)
    keys = set()
    for context in (None, text(30), text(31)):
        response = ask(server, "offset", [other, {"text": chunk, "context": context}], question)
        assert statuses(response)[1] == "filled"
        assert_exact(response, oracle("tiny-llama"), "offset")
        keys.add(response["cache"]["chunks"][1]["key"])
    assert len(keys) == 3
    response = ask(server, "offset", [{"text": text(40), "context": text(700)}, text(30)], text(9))
    assert len((contexts_of(response["cache"]) or [])[0]) == 512
    assert_exact(response, oracle("tiny-llama"), "offset")


@pytest.mark.parametrize("cache", [{"scope": "isolated"}, {"recompute": 0.5}, {"sparse": {"budget_share": 0.6}}])
def test_other_options(cache: dict[str, Any], server: TesseraServer, oracle: Any, text: Text) -> None:
    chunks: list[Any] = [{"text": text(n), "context": text(n)} for n in (50, 70, 40)]
    for _ in ("computed", "cached"):
        response = ask(server, "offset", chunks, text(12), cache=cache)
        assert_exact(response, oracle("tiny-llama"), "offset")


def test_computed_ahead_and_asked_by_id_and_in_openai_requests(server: TesseraServer, oracle: Any, text: Text) -> None:
    chunk = {"id": "with-context", "text": text(50), "context": text(80)}
    server.ingest([chunk], system="You answer from documents.")
    response = ask(server, "offset", [{"id": "with-context"}, text(30)], text(12))
    assert statuses(response) == ["hit", "filled"]
    assert_exact(response, oracle("tiny-llama"), "offset")
    given = ask(server, "offset", [chunk, text(31)], text(12))
    assert statuses(given)[0] == "hit"
    refused = server.client.post("/v1/rag/chunks", json={"chunks": [{"id": "with-context", "text": chunk["text"]}]})
    assert refused.status_code == 409, refused.text
    document = {"text": text(40), "context": text(20)}
    body = {"model": server.model, "messages": [{"role": "user", "content": "Why?"}], "max_tokens": 1}
    body |= {"documents": [document, {"text": text(30)}], "cache": {"explain": True}}
    report = server.post("/v1/chat/completions", body)["kv_transfer_params"]["cache"]
    assert [bool(each) for each in contexts_of(report) or []] == [True, False]
