# SPDX-License-Identifier: Apache-2.0
"""Sparse requests: the chunks that the question attends to most, exact without the others, at their positions."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from cache.sparse import shares
from tests.engine.server import TesseraServer, token_logprobs
from tests.support.exactness import PROBED, STRATEGIES, SUFFIX, ask, assert_exact, attention, kept_of, segments
from tests.support.tier_servers import to_sleep

BLOCK = 32
LITTLE = ("--num-gpu-blocks-override", "18", "--max-model-len", str(17 * BLOCK), "--chunk-cache-memory", "4MiB")
"""Blocks for one context, and a pool for two."""
LENGTHS = (60, 90, 45, 120, 75, 30)
BUDGET = 200


def ask_sparse(
    server: TesseraServer,
    strategy: str,
    chunks: list[str],
    question: str,
    cache: dict[str, Any] | None = None,
    **given: Any,
) -> dict[str, Any]:
    sparse = {"budget_tokens": given.pop("budget", BUDGET), "mass": given.pop("mass", 1.0)}
    return ask(server, strategy, chunks, question, cache={"sparse": sparse, **(cache or {})}, **given)


def assert_selected(
    server: TesseraServer, response: dict[str, Any], oracle: Any, strategy: str, budget: int = BUDGET
) -> None:
    """The attention and the choice are the oracle's."""
    report = response["cache"]
    paid = [sum(each) for each in attention(server, oracle, report, strategy)]
    assert [chunk["share"] for chunk in report["chunks"]] == pytest.approx(shares(paid), abs=1e-3)
    lengths, kept, left = [chunk["tokens"] for chunk in report["chunks"]], [], budget
    for index in sorted(range(len(paid)), key=lambda index: -paid[index]):
        if not kept or lengths[index] <= left:
            kept.append(index)
            left -= lengths[index]
    assert kept_of(report) == sorted(kept)
    assert report["tokens"]["left_out"] == sum(n for index, n in enumerate(lengths) if index not in kept) > 0
    assert response["usage"]["prompt_tokens"] == report["tokens"]["prompt"] - report["tokens"]["left_out"]


@pytest.mark.serve_with(*PROBED)
@pytest.mark.parametrize("strategy", [*STRATEGIES, "window"])
def test_selection_and_answer_are_the_oracles(strategy, server, oracle, text):
    chunks = [text(length) for length in LENGTHS]
    for number, question in enumerate((text(30), text(2 * BLOCK), "?")):
        response = ask_sparse(server, strategy, chunks, question)
        assert {chunk["status"] for chunk in response["cache"]["chunks"] if chunk.get("kept", True)} == {
            "hit" if number else "filled"
        }
        assert_selected(server, response, oracle("tiny-llama"), strategy)
        assert_exact(response, oracle("tiny-llama"), strategy)


@pytest.mark.serve_with(*PROBED)
@pytest.mark.parametrize("strategy", [*STRATEGIES, "window"])
def test_closed_gaps_are_the_request_without_the_other_chunks(strategy, server, oracle, text):
    chunks, question = [text(length) for length in LENGTHS], text(30)
    for _ in range(2):  # computed, and cached
        sparse = {"budget_tokens": BUDGET, "gaps": "close"}
        response = ask(server, strategy, chunks, question, cache={"sparse": sparse})
        assert_selected(server, response, oracle("tiny-llama"), strategy)
        system, given, asked = segments(response["cache"])
        kept = (system, [given[index] for index in kept_of(response["cache"])], asked)
        tokens = response["choices"][0]["token_ids"]
        expected = oracle("tiny-llama").score(strategy, kept, tokens)
        assert token_logprobs(response) == pytest.approx(expected.logprobs, abs=1e-4)


@pytest.mark.serve_with(*PROBED)
def test_some_cached_some_given_twice_and_full_attention(server, oracle, text):
    chunks = [text(length) for length in LENGTHS]
    ask(server, "offset", chunks[:2], text(9))
    ask_sparse(server, "offset", chunks[:4], text(9))
    response = ask_sparse(server, "offset", chunks[::-1], text(20))
    assert_selected(server, response, oracle("tiny-llama"), "offset")
    assert_exact(response, oracle("tiny-llama"), "offset")
    report = response["cache"]
    computed = {i for i in kept_of(report) if report["chunks"][i]["status"] == "filled"}
    assert computed <= {0, 1}
    cached = response["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == report["tokens"]["reused"]
    assert report["tokens"]["computed"] == len(segments(report)[2]) + sum(
        report["chunks"][index]["tokens"] for index in computed
    )
    twice = text(60)
    for _ in range(2):
        response = ask_sparse(server, "offset", [twice, text(90), twice, text(100)], text(20))
        assert_selected(server, response, oracle("tiny-llama"), "offset")
        assert_exact(response, oracle("tiny-llama"), "offset")
    chunks = [text(length) for length in LENGTHS]
    full = ask_sparse(server, "offset", chunks, text(20), {"mode": "full"})["cache"]
    assert full["mode"] == "full"
    assert "left_out" not in full["tokens"]
    assert all("kept" not in chunk for chunk in full["chunks"])


@pytest.mark.serve_with(*PROBED)
def test_a_budget_for_all_changes_nothing(server, text):
    chunks, question = [text(length) for length in LENGTHS], text(20)
    ask(server, "offset", chunks, question)
    plain = ask(server, "offset", chunks, question)  # vLLM's prefix cache has its blocks, as of the next one
    wide = ask_sparse(server, "offset", chunks, question, budget=sum(LENGTHS) + SUFFIX * len(LENGTHS))
    assert token_logprobs(wide) == token_logprobs(plain)
    assert "left_out" not in wide["cache"]["tokens"]
    assert "share" not in wide["cache"]["chunks"][0]
    single = ask_sparse(server, "offset", chunks[:1], question, budget=1)
    assert "share" not in single["cache"]["chunks"][0]
    nearly = ask_sparse(server, "offset", chunks, question, mass=0.01)
    assert len(kept_of(nearly["cache"])) == 1


@pytest.mark.serve_with(*PROBED)
@pytest.mark.parametrize("cache", [{"scope": "isolated"}, {}])
def test_scopes_and_prompts_without_a_system_segment(cache, server, oracle, text):
    chunks = [text(length) for length in LENGTHS]
    for system in (text(40), ""):
        response = ask_sparse(server, "offset", chunks, text(20), cache, system=system)
        assert_selected(server, response, oracle("tiny-llama"), "offset")
        assert_exact(response, oracle("tiny-llama"), "offset")


def test_requests_may_ask_for_a_budget_on_any_server(server, oracle, text):
    response = ask_sparse(server, "offset", [text(length) for length in LENGTHS], text(20))
    assert response["cache"]["tokens"]["left_out"] > 0
    assert_exact(response, oracle("tiny-llama"), "offset")


@pytest.mark.matrix
@pytest.mark.serve_with(*PROBED, "--chunk-cache-tiers", "host://?size=64MiB")
def test_chunks_are_loaded_from_a_tier_to_be_chosen_from(server, oracle, text):
    chunks = [text(length) for length in LENGTHS]
    ask(server, "offset", chunks, text(5))
    to_sleep(server)
    loaded = server.stats()["counters"]["fills"].get("loaded", 0)
    response = ask_sparse(server, "offset", chunks, text(20))
    assert_selected(server, response, oracle("tiny-llama"), "offset")
    assert_exact(response, oracle("tiny-llama"), "offset")
    report = response["cache"]
    kept = kept_of(report)
    assert [chunk["status"] for chunk in report["chunks"]] == [
        "loaded" if index in kept else None for index in range(len(chunks))
    ]
    assert server.stats()["counters"]["fills"]["loaded"] == loaded + len(chunks)  # one with the system segment


@pytest.mark.matrix
@pytest.mark.parametrize("placement", ["attend", "in-place"])
def test_other_placements(placement, serve, oracle, text):
    server = serve("tiny-llama", *PROBED, "--chunk-cache-placement", placement)
    chunks = [text(length) for length in LENGTHS]
    for strategy, question in itertools.product(STRATEGIES, (text(30), text(9))):
        response = ask_sparse(server, strategy, chunks, question, budget=250)
        assert_selected(server, response, oracle("tiny-llama"), strategy, 250)
        assert_exact(response, oracle("tiny-llama"), strategy)


@pytest.mark.matrix
@pytest.mark.serve_with(*PROBED, *LITTLE, "--max-num-batched-tokens", "48")
def test_preempted_evicted_and_in_pieces(server, oracle, text):
    """Several at once, in blocks for one context."""
    chunks = [text(length) for length in LENGTHS]
    questions, answered = [text(40) for _ in range(8)], []

    def answer(question: str) -> dict[str, Any]:
        return ask_sparse(server, "offset", chunks, question, max_tokens=12)

    others = [[text(100) for _ in range(3)] for _ in questions]
    with ThreadPoolExecutor(len(questions)) as threads, ThreadPoolExecutor(1) as thread:
        evicting = thread.map(lambda chunks: ask(server, "offset", chunks, "?", max_tokens=1), others)
        for response in threads.map(answer, questions):
            if response["cache"]["mode"] == "full":
                assert "more pages" in response["cache"]["reason"]
                continue
            assert_selected(server, response, oracle("tiny-llama"), "offset")
            assert_exact(response, oracle("tiny-llama"), "offset", steps=12)
            answered.append(response)
        list(evicting)
    assert answered
    assert server.stats()["counters"]["removals"]["evicted"] > 0
