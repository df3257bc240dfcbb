# SPDX-License-Identifier: Apache-2.0
"""Windows that the question chooses are computed anew behind everything before them, exactly, and nothing else."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from cache.positions.layout import Place
from cache.sparse import shares
from cache.windows import choose_windows
from engine_ext.start.startup import PAGE_TOKENS
from tests.engine.server import TesseraServer, token_logprobs
from tests.support.concurrently import rag_body
from tests.support.exactness import PROBED, ask, assert_exact, assert_scored, attention, segments, statuses
from tests.support.small_pool import SMALL

LENGTHS = (50, 130, 70, 25)


def recomputed(server: TesseraServer, share: float, chunks: list[str], question: str, **fields: Any) -> Any:
    cache = {"recompute": share, **fields.pop("cache", {})}
    response = ask(server, "offset", chunks, question, cache=cache, **fields)
    assert response["cache"].get("recompute", 0) == share
    return response


def windows_of(report: dict[str, Any]) -> list[list[list[int]]]:
    return [chunk.get("recomputed", []) for chunk in report["chunks"]]


@pytest.mark.parametrize("share", [0.15, 0.5, pytest.param(1.0, marks=pytest.mark.matrix)])
@pytest.mark.parametrize("model", ["tiny-llama", pytest.param("tiny-qwen3", marks=pytest.mark.matrix)])
def test_missing_and_cached_in_every_order_of_three(model, share, server, oracle, text):
    chunks, system = [text(n) for n in (50, 130, 70)], text(20)
    for status, order in zip(["filled", *["hit"] * 5], itertools.permutations(chunks), strict=True):
        response = recomputed(server, share, list(order), text(12), system=system)
        assert statuses(response) == [status] * 3
        assert any(windows_of(response["cache"])[1:])
        assert_exact(response, oracle(model), "offset")


@pytest.mark.serve_with(*PROBED)
def test_the_windows_are_those_of_the_oracles_attention(server, oracle, text):
    chunks = [text(n) for n in LENGTHS]
    response = recomputed(server, 0.4, chunks, text(40))
    report = response["cache"]
    paid = attention(server, oracle("tiny-llama"), report)
    given = segments(report)[1]
    starts = list(itertools.accumulate(map(len, given[1:]), initial=0))
    places = [Place(start, len(chunk), start, 0) for start, chunk in zip(starts, given[1:], strict=False)]
    expected = choose_windows(
        [each for chunk in paid[1:] for each in chunk], places, int(0.4 * sum(map(len, given))), PAGE_TOKENS
    )
    found = [
        (start + first, start + end)
        for start, windows in zip(starts, windows_of(report)[1:], strict=False)
        for first, end in windows
    ]
    assert found == expected
    assert [chunk["share"] for chunk in report["chunks"]] == pytest.approx(
        shares([sum(each) for each in paid]), abs=1e-3
    )


def test_everything_anew_is_full_attention(server, oracle, text):
    response = recomputed(server, 1, [text(n) for n in (40, 90, 33)], text(12))
    assert_scored(response, oracle("tiny-llama"))


def test_isolated_chunks(server, oracle, text):
    chunks = [text(60), text(45)]
    for _ in ("filled", "hit"):
        response = recomputed(server, 0.5, chunks, text(12), system=text(30), cache={"scope": "isolated"})
        assert_exact(response, oracle("tiny-llama"), "offset")


def test_a_chunk_given_twice(server, oracle, text):
    twice = text(60)
    response = recomputed(server, 0.5, [twice, text(90), twice, text(100)], text(20))
    assert_exact(response, oracle("tiny-llama"), "offset")


@pytest.mark.parametrize("gaps", ["keep", "close"])
def test_windows_of_the_chunks_that_a_sparse_request_keeps(gaps, server, oracle, text):
    chunks = [text(n) for n in (60, 90, 45, 120, 75)]
    sparse = {"budget_share": 0.6, **({"gaps": "close"} if gaps == "close" else {})}
    response = recomputed(server, 0.3, chunks, text(30), cache={"sparse": sparse})
    report = response["cache"]
    assert report["tokens"]["left_out"] > 0
    if gaps == "close":
        system, given, question = segments(report)
        kept = [index for index, chunk in enumerate(report["chunks"]) if chunk.get("kept", True)]
        windows = [report["chunks"][index].get("recomputed", []) for index in kept]
        tokens = response["choices"][0]["token_ids"]
        expected = oracle("tiny-llama").score(
            "offset", (system, [given[index] for index in kept], question), tokens, windows=windows
        )
        assert token_logprobs(response) == pytest.approx(expected.logprobs, abs=1e-4)
    else:
        assert_exact(response, oracle("tiny-llama"), "offset")


def test_one_chunk_has_nothing_before_it(server, oracle, text):
    response = recomputed(server, 0.5, [text(60)], text(12))
    assert windows_of(response["cache"]) == [[]]
    assert "recompute" not in response["cache"]["timings_ms"]
    assert_exact(response, oracle("tiny-llama"), "offset")


@pytest.mark.serve_with(*SMALL)
def test_many_at_once_in_a_pool_that_evicts(server, oracle, text):
    """Requests with and without windows over the same chunks and places never mix."""
    chunks = [text(n) for n in (30, 45, 60, 25)]
    orders = list(itertools.permutations(chunks, 3))

    def send(i: int) -> tuple[str, Any]:
        question = f"{i % 5} and {'more ' * (i % 3)}"
        if i % 3 == 2:
            strategy = ("offset", "shared")[i % 2]
            return strategy, ask(server, strategy, list(orders[i % 7]), question)
        cache = {"recompute": (0.3, 0.6)[i % 2]}
        return "offset", ask(server, "offset", list(orders[i % 7]), question, cache=cache)

    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(send, range(42)))
    modes = [answer["cache"]["mode"] for _, answer in answers]
    assert modes.count("chunked") > len(modes) / 2, modes
    for strategy, answer in answers:
        if answer["cache"]["mode"] == "chunked":
            assert_exact(answer, oracle("tiny-llama"), strategy)


def test_what_was_computed_is_counted(server, text):
    chunks = [text(100), text(80), text(90)]
    ask(server, "offset", chunks, text(12))
    body = rag_body("You answer from documents.", chunks, "?", "offset")
    plan = server.post("/v1/rag/plan", {**body, "cache": {**body["cache"], "recompute": 0.2}})
    assert (plan["mode"], plan["recompute"], plan["tokens"]["missing"]) == ("chunked", 0.2, 0)
    report = recomputed(server, 0.2, chunks, text(12))["cache"]
    question = len(report["segments"][-1]["token_ids"])
    num_anew = sum(end - first for windows in windows_of(report) for first, end in windows)
    assert 0 < num_anew <= 0.2 * sum(chunk["tokens"] for chunk in report["chunks"])
    assert report["tokens"]["computed"] == question + num_anew
    assert report["timings_ms"]["recompute"] > 0
    tokens = recomputed(server, 0.2, [text(100), chunks[0], text(90)], text(12))["cache"]["tokens"]
    assert tokens["reused"] >= 0, "windows of chunks that the request filled itself are counted once"
    assert tokens["fill_computed"] > tokens["computed"] - question


def test_overlapping_chunks_have_nothing_before_them(server):
    cache = {"position_strategy": "shared", "recompute": 0.1}
    response = server.client.post("/v1/rag/chat", json={"chunks": ["a", "b"], "question": "?", "cache": cache})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "cache.recompute")
