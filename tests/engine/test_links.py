# SPDX-License-Identifier: Apache-2.0
"""Link tokens are exact: recomputed behind the preceding chunks, and nothing else changes."""

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.engine.server import TesseraServer
from tests.support.concurrently import rag_body
from tests.support.exactness import ask, assert_exact, segments, statuses, token_logprobs
from tests.support.small_pool import SMALL

Text = Callable[[int], str]

CONTEXTS = ["cached", "chained"]


def linked(server: TesseraServer, number: int, context: str, chunks: list[str], question: str, **fields: Any) -> Any:
    cache = {"link_tokens": number, "link_context": context, **fields.pop("cache", {})}
    response = ask(server, "offset", chunks, question, cache=cache, **fields)
    assert response["cache"]["links"] == {"tokens": number, "context": context}
    return response


IN_EVERY_RUN = [(1, "cached"), (8, "chained"), (16, "chained"), (32, "cached"), (500, "cached"), (500, "chained")]


def cases() -> Iterator[Any]:
    """Model, number and context."""
    for model, *case in itertools.product(["tiny-llama", "tiny-qwen3"], [1, 8, 16, 32, 500], CONTEXTS):
        is_left_out = model != "tiny-llama" or tuple(case) not in IN_EVERY_RUN
        yield pytest.param(model, *case, marks=[pytest.mark.matrix] if is_left_out else [])


@pytest.mark.parametrize(("model", "number", "context"), list(cases()))
def test_missing_and_cached_in_every_order_of_three(
    model: str, number: int, context: str, server: TesseraServer, oracle: Any, text: Text
) -> None:
    chunks, system = [text(n) for n in (50, 130, 25)], text(20)
    for status, order in zip(["filled", *["hit"] * 5], itertools.permutations(chunks), strict=True):
        response = linked(server, number, context, list(order), text(12), system=system)
        assert statuses(response) == [status] * 3
        assert_exact(response, oracle(model), "offset")
        again = linked(server, number, context, list(order), text(9), system=system)
        assert_exact(again, oracle(model), "offset")


def test_whole_chunks_in_a_chain_are_full_attention(server: TesseraServer, oracle: Any, text: Text) -> None:
    response = linked(server, 1000, "chained", [text(n) for n in (40, 90, 33)], text(12))
    tokens = response["choices"][0]["token_ids"]
    expected = oracle("tiny-llama").score("full", segments(response["cache"]), tokens)
    assert token_logprobs(response) == pytest.approx(expected.logprobs, abs=1e-4)


@pytest.mark.parametrize("context", CONTEXTS)
def test_isolated_chunks_are_linked_to_the_system_segment(
    context: str, server: TesseraServer, oracle: Any, text: Text
) -> None:
    chunks = [text(60), text(45)]
    for _ in ("filled", "hit"):
        response = linked(server, 8, context, chunks, text(12), system=text(30), cache={"scope": "isolated"})
        assert_exact(response, oracle("tiny-llama"), "offset")


def test_one_chunk_has_nothing_to_be_linked_to(server: TesseraServer, oracle: Any, text: Text) -> None:
    response = linked(server, 8, "chained", [text(60)], text(12))
    assert "link" not in response["cache"]["timings_ms"]
    assert_exact(response, oracle("tiny-llama"), "offset")


@pytest.mark.serve_with(*SMALL)
@pytest.mark.parametrize("context", CONTEXTS)
def test_many_at_once_in_a_pool_that_evicts(context: str, server: TesseraServer, oracle: Any, text: Text) -> None:
    """Linked and plain requests over the same chunks and places never mix."""
    chunks = [text(n) for n in (30, 45, 60, 25)]
    orders = list(itertools.permutations(chunks, 3))

    def send(i: int) -> tuple[str, Any]:
        question = f"{i % 5} and {'more ' * (i % 3)}"
        if i % 3 == 2:
            strategy = ("offset", "shared")[i % 2]
            return strategy, ask(server, strategy, list(orders[i % 7]), question)
        return "offset", linked(server, (4, 16)[i % 2], context, list(orders[i % 7]), question)

    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(send, range(42)))
    modes = [answer["cache"]["mode"] for _, answer in answers]
    assert modes.count("chunked") > len(modes) / 2, modes
    for strategy, answer in answers:
        if answer["cache"]["mode"] == "chunked":
            assert_exact(answer, oracle("tiny-llama"), strategy)


def test_what_was_computed_is_counted(server: TesseraServer, text: Text) -> None:
    chunks = [text(100), text(80), text(90)]
    fills = server.stats()["counters"]["fills"].get("linked", 0)
    ask(server, "offset", chunks, text(12))
    body = rag_body("You answer from documents.", chunks, "?", "offset")
    plan = server.post("/v1/rag/plan", {**body, "cache": {**body["cache"], "link_tokens": 8}})
    assert (plan["mode"], plan["link_tokens"]) == ("chunked", 8)
    assert (plan["tokens"]["missing"], plan["pages"]["needed"]) == (0, 2)
    report = linked(server, 8, "cached", chunks, text(12))["cache"]
    question = len(report["segments"][-1]["token_ids"])
    assert report["tokens"]["computed"] == question + 2 * 8
    assert report["timings_ms"]["link"] > 0
    assert server.stats()["counters"]["fills"]["linked"] == fills + 2


def test_overlapping_chunks_have_no_places_to_link(server: TesseraServer) -> None:
    cache = {"position_strategy": "shared", "link_tokens": 8}
    response = server.client.post("/v1/rag/chat", json={"chunks": ["a", "b"], "question": "?", "cache": cache})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "cache.link_tokens")
