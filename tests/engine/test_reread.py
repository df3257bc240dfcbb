# SPDX-License-Identifier: Apache-2.0
"""Chunks that the question attends to are read again before it: exactly, and reported."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.engine.conftest import MAX_MODEL_LEN
from tests.engine.server import TesseraServer
from tests.support.concurrently import rag_body
from tests.support.exactness import PROBED, STRATEGIES, SUFFIX, ask, assert_exact, attention, statuses
from tests.support.parallel import ENVIRONMENT, WORKERS
from tests.support.small_pool import SMALL


def reread(
    server: TesseraServer, share: float, chunks: list[str], question: str, strategy: str = "offset", **fields: Any
) -> Any:
    response = ask(server, strategy, chunks, question, cache={"reread": share, **fields.pop("cache", {})}, **fields)
    report = response["cache"]
    again = [each["token_ids"] for each in report["segments"] if each["kind"] == "reread"]
    chosen = [chunk for chunk in report["chunks"] if chunk.get("reread")]
    assert [len(each) for each in again] == [chunk["tokens"] for chunk in chosen]
    assert report["tokens"].get("reread", 0) == sum(map(len, again))
    assert response["usage"]["prompt_tokens"] == report["tokens"]["prompt"] - report["tokens"].get("left_out", 0)
    return response


def read_again(report: dict[str, Any]) -> list[int]:
    return [index for index, chunk in enumerate(report["chunks"]) if chunk.get("reread")]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("model", ["tiny-llama", pytest.param("tiny-qwen3", marks=pytest.mark.matrix)])
def test_missing_and_cached_in_every_order_of_three(model, strategy, server, oracle, text):
    chunks, system = [text(n) for n in (50, 130, 70)], text(20)
    for status, order in zip(["filled", *["hit"] * 5], itertools.permutations(chunks), strict=True):
        response = reread(server, 0.6, list(order), text(12), strategy, system=system)
        assert statuses(response) == [status] * 3
        assert read_again(response["cache"])
        assert_exact(response, oracle(model), strategy)


@pytest.mark.serve_with(*PROBED)
def test_the_chunks_are_those_of_the_oracles_attention(server, oracle, text):
    chunks = [text(n) for n in (50, 52, 48, 51, 49, 50)]
    report = reread(server, 0, chunks, "why so", cache={"reread": 0, "recompute": 0})["cache"]
    paid = [sum(each) for each in attention(server, oracle("tiny-llama"), report)]
    best = sorted(range(len(chunks)), key=lambda index: -paid[index])
    for share, count in ((0.05, 0), (0.15, 1), (0.34, 2), (0.5, 3), (1, 6)):
        response = reread(server, share, chunks, "why so")
        assert read_again(response["cache"]) == sorted(best[:count])
        assert response["cache"].get("reread") == (share or None)
        assert_exact(response, oracle("tiny-llama"), "offset")


@pytest.mark.parametrize("gaps", ["keep", "close"])
def test_of_the_chunks_that_a_sparse_request_keeps(gaps, server, text):
    chunks = [text(60) for _ in range(6)]
    sparse = {"budget_share": 0.5, **({"gaps": "close"} if gaps == "close" else {})}
    report = reread(server, 0.4, chunks, text(30), cache={"sparse": sparse})["cache"]
    kept = [index for index, chunk in enumerate(report["chunks"]) if chunk.get("kept", True)]
    assert len(kept) == 3
    assert len(read_again(report)) == 1
    assert {*read_again(report)} < {*kept}


def test_isolated_chunks_and_citations(server, oracle, text):
    chunks = [text(60), text(45)]
    for _ in ("filled", "hit"):
        cache = {"scope": "isolated", "cite": True}
        response = reread(server, 0.5, chunks, text(12), system=text(30), cache=cache)
        assert_exact(response, oracle("tiny-llama"), "offset")
        assert response["cache"]["citations"]


def test_one_chunk_is_read_once(server, text):
    report = reread(server, 1, [text(60)], text(12))["cache"]
    assert "select" not in report["timings_ms"]


def test_the_answer_keeps_its_room(server, text):
    """Behind a system prompt that leaves room for three of four chunks, or for none."""
    system = text(MAX_MODEL_LEN - 480)

    def used(chunks: list[str], most: int) -> dict[str, int]:
        return reread(server, 1, chunks, "?", max_tokens=most, system=system)["cache"]["tokens"]

    chunks, size = [text(60) for _ in range(4)], 60 + SUFFIX
    found = used(chunks, 1)
    left = MAX_MODEL_LEN - (found["prompt"] - found["reread"])
    assert found["reread"] == (left - 1) // size * size
    assert 0 < found["reread"] < 4 * size
    assert used(chunks, left - size)["reread"] == size
    assert "reread" not in used(chunks, left - size + 1)

    longer = [text(100) for _ in range(4)]
    left = MAX_MODEL_LEN - used(longer, 1)["prompt"]
    assert 0 < left < 100
    assert "reread" not in used(longer, left)


def test_the_plan_names_it(server, text):
    body = rag_body("You answer.", [text(100), text(80)], "?", "offset")
    assert server.post("/v1/rag/plan", {**body, "cache": {"reread": 0.25}})["reread"] == 0.25


@pytest.mark.matrix
@pytest.mark.parametrize(
    "flags",
    [
        ("--chunk-cache-placement", "in-place", "--block-size", "32"),
        ("--chunk-cache-placement", "attend"),
        ("--no-enable-prefix-caching",),
        WORKERS["tensor parallel"],
    ],
)
def test_placements_prefix_caching_and_two_workers(flags, serve, oracle, text):
    server = serve("tiny-llama", *flags, environment=ENVIRONMENT if flags in WORKERS.values() else None)
    chunks = [text(n) for n in (60, 45, 70)]
    for strategy in STRATEGIES:
        for order in (chunks, chunks[::-1]):
            response = reread(server, 0.5, order, text(12), strategy)
            assert read_again(response["cache"])
            assert_exact(response, oracle("tiny-llama"), strategy)


@pytest.mark.serve_with(*SMALL)
def test_many_at_once_in_a_pool_that_evicts(server, oracle, text):
    orders = list(itertools.permutations([text(n) for n in (30, 45, 60, 25)], 3))

    def send(i: int) -> Any:
        return reread(server, (0.0, 0.3, 0.6)[i % 3], list(orders[i % 7]), f"{i % 5} and more")

    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(send, range(30)))
    chunked = [answer for answer in answers if answer["cache"]["mode"] == "chunked"]
    assert len(chunked) > len(answers) / 2
    for answer in chunked:
        assert_exact(answer, oracle("tiny-llama"), "offset")
