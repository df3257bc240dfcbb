# SPDX-License-Identifier: Apache-2.0
"""Windows computed anew and chunks read again: the question chooses them, and answers are exact."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from cache.positions.layout import Place
from cache.sparse import shares
from cache.windows import choose_windows
from engine_ext.start.startup import PAGE_TOKENS
from tests.engine.conftest import MAX_MODEL_LEN
from tests.engine.server import TesseraServer, token_logprobs
from tests.support.concurrently import rag_body
from tests.support.exactness import (
    PROBED,
    STRATEGIES,
    SUFFIX,
    ask,
    assert_exact,
    assert_scored,
    attention,
    segments,
    statuses,
)
from tests.support.parallel import ENVIRONMENT, WORKERS
from tests.support.small_pool import SMALL

LENGTHS = (50, 130, 70, 25)


def recomputed(server: TesseraServer, share: float, chunks: list[str], question: str, **fields: Any) -> Any:
    cache = {"recompute": share, **fields.pop("cache", {})}
    response = ask(server, "offset", chunks, question, cache=cache, **fields)
    assert response["cache"].get("recompute", 0) == share
    return response


def windows_of(report: dict[str, Any]) -> list[list[list[int]]]:
    return [chunk.get("recomputed", []) for chunk in report["chunks"]]


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


@pytest.mark.parametrize(
    ("name", "share", "strategy"),
    [
        *(("recompute", share, "offset") for share in (0.15, 0.5)),
        pytest.param("recompute", 1.0, "offset", marks=pytest.mark.matrix),
        *(("reread", 0.6, strategy) for strategy in STRATEGIES),
    ],
)
@pytest.mark.parametrize("model", ["tiny-llama", pytest.param("tiny-qwen3", marks=pytest.mark.matrix)])
def test_missing_and_cached_in_every_order_of_three(model, name, share, strategy, server, oracle, text):
    chunks, system = [text(n) for n in (50, 130, 70)], text(20)
    for status, order in zip(["filled", *["hit"] * 5], itertools.permutations(chunks), strict=True):
        if name == "reread":
            response = reread(server, share, list(order), text(12), strategy, system=system)
            assert read_again(response["cache"])
        else:
            response = recomputed(server, share, list(order), text(12), system=system)
            assert any(windows_of(response["cache"])[1:])
        assert statuses(response) == [status] * 3
        assert_exact(response, oracle(model), strategy)


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


def test_isolated_chunks_a_chunk_given_twice_and_everything_anew(server, oracle, text):
    """All windows anew are full attention."""
    chunks, isolated, twice = [text(60), text(45)], {"scope": "isolated"}, text(60)
    for _ in ("filled", "hit"):
        response = recomputed(server, 0.5, chunks, text(12), system=text(30), cache=isolated)
        assert_exact(response, oracle("tiny-llama"), "offset")
        response = reread(server, 0.5, chunks, text(12), system=text(31), cache={**isolated, "cite": True})
        assert_exact(response, oracle("tiny-llama"), "offset")
        assert response["cache"]["citations"]
    response = recomputed(server, 0.5, [twice, text(90), twice, text(100)], text(20))
    assert_exact(response, oracle("tiny-llama"), "offset")
    assert_scored(recomputed(server, 1, [text(n) for n in (40, 90, 33)], text(12)), oracle("tiny-llama"))


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


@pytest.mark.parametrize("gaps", ["keep", "close"])
def test_of_the_chunks_that_a_sparse_request_keeps(gaps, server, text):
    chunks = [text(60) for _ in range(6)]
    sparse = {"budget_share": 0.5, **({"gaps": "close"} if gaps == "close" else {})}
    report = reread(server, 0.4, chunks, text(30), cache={"sparse": sparse})["cache"]
    kept = [index for index, chunk in enumerate(report["chunks"]) if chunk.get("kept", True)]
    assert len(kept) == 3
    assert len(read_again(report)) == 1
    assert {*read_again(report)} < {*kept}


def test_one_chunk_has_nothing_before_it_and_is_read_once(server, oracle, text):
    response = recomputed(server, 0.5, [text(60)], text(12))
    assert windows_of(response["cache"]) == [[]]
    assert "recompute" not in response["cache"]["timings_ms"]
    assert_exact(response, oracle("tiny-llama"), "offset")
    assert "select" not in reread(server, 1, [text(60)], text(12))["cache"]["timings_ms"]


@pytest.mark.serve_with(*SMALL)
def test_many_at_once_in_a_pool_that_evicts(server, oracle, text):
    """Requests with and without windows or chunks read again, over the same chunks and places, never mix."""
    orders = list(itertools.permutations([text(n) for n in (30, 45, 60, 25)], 3))
    asked: list[tuple[str, dict[str, Any]]] = [("offset", {"recompute": 0.3}), ("offset", {"recompute": 0.6})]
    asked += [("offset", {"reread": share}) for share in (0.0, 0.3, 0.6)]
    asked += [("offset", {}), ("shared", {}), ("offset", {"recompute": 0.3})]

    def send(i: int) -> tuple[str, Any]:
        strategy, cache = asked[i % len(asked)]
        question = f"{i % 5} and {'more ' * (i % 3)}"
        if "reread" in cache:
            return strategy, reread(server, cache["reread"], list(orders[i % 7]), question)
        return strategy, ask(server, strategy, list(orders[i % 7]), question, cache=cache)

    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(send, range(72)))
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


def test_overlapping_chunks_have_nothing_before_them_and_a_plan_names_the_share(server, text):
    cache = {"position_strategy": "shared", "recompute": 0.1}
    response = server.client.post("/v1/rag/chat", json={"chunks": ["a", "b"], "question": "?", "cache": cache})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "cache.recompute")
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
