# SPDX-License-Identifier: Apache-2.0
"""Answers with the chunk cache equal the oracle's masked or composed Hugging Face forward passes in fp32."""

import itertools
import os
import re
from statistics import mean

import pytest

from tests.engine.server import token_logprobs
from tests.engine.sharing import SMALL_STEPS
from tests.support.exactness import (
    LLAMA_MHA,
    ONE_OF_STRATEGIES,
    QWEN3,
    QWEN3_MHA,
    STRATEGIES,
    SUFFIX,
    ask,
    assert_exact,
    segments,
    statuses,
)

IS_IN_PLACE = os.environ.get("TESSERA_CHUNK_CACHE_PLACEMENT") == "in-place"
"""These tests may run in place, where white space pads segments to whole blocks."""


@pytest.mark.parametrize("model", ["tiny-llama", QWEN3])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_order_of_four(model, strategy, server, oracle, text):
    chunks = [text(n) for n in (50, 130, 17, 88)]
    ask(server, strategy, chunks, text(10))
    for order in itertools.permutations(chunks):
        response = ask(server, strategy, list(order), text(12))
        assert statuses(response) == ["hit"] * 4
        assert_exact(response, oracle(model), strategy)


@pytest.mark.parametrize("model", ["tiny-llama", QWEN3])
@pytest.mark.parametrize("strategy", ONE_OF_STRATEGIES)
def test_any_number_of_chunks_and_one_given_twice(model, strategy, server, oracle, text):
    for lengths in ([90], [60 + 11 * i for i in range(12)]):
        chunks = [text(n) for n in lengths]
        for _ in ("filled", "hit"):
            assert_exact(ask(server, strategy, chunks, text(15)), oracle(model), strategy)
    twice, other = text(70), text(40)
    for status in ("filled", "hit"):
        response = ask(server, strategy, [twice, other, twice], text(15))
        assert statuses(response) == [status] * 3
        assert_exact(response, oracle(model), strategy)


@pytest.mark.parametrize("model", ["tiny-llama", QWEN3])
@pytest.mark.parametrize("strategy", ONE_OF_STRATEGIES)
def test_isolated_chunks_are_reused_behind_any_system_prompt(model, strategy, server, oracle, text):
    isolated = {"scope": "isolated"}
    a, b, c = (text(n) for n in (100, 37, 150))
    first = ask(server, strategy, [a, b], text(20), system=text(30), cache=isolated)
    assert statuses(first) == ["filled"] * 2
    cached = ask(server, strategy, [b, a], text(31), system=text(200), cache=isolated)
    assert statuses(cached) == ["hit"] * 2
    some = ask(server, strategy, [c, a], text(9), system=text(5), cache=isolated)
    assert statuses(some) == ["filled", "hit"]
    # Without a system prompt the system segment is the opening itself, and both scopes mean the same.
    alone = ask(server, strategy, [a, c], text(9), system="", cache=isolated)
    same = ask(server, strategy, [c, a], text(9), system="")
    assert statuses(alone) == statuses(same) == ["hit"] * 2
    assert alone["cache"]["segments"][0]["token_ids"] == alone["cache"]["opening"] == first["cache"]["opening"]
    for response in (first, cached, some, alone, same):
        assert_exact(response, oracle(model), strategy)


@pytest.mark.parametrize("strategy", ONE_OF_STRATEGIES)
def test_the_scopes_of_one_chunk_never_mix(strategy, server, oracle, text):
    """Neither in the chunk cache nor in vLLM's prefix cache, which hits repeats of either layout."""
    system, chunks = text(60), [text(200), text(130)]
    question = text(200)
    responses = {
        (scope, turn): ask(server, strategy, chunks, question, system=system, cache={"scope": scope})
        for turn in range(3)
        for scope in ("system", "isolated")
    }
    num_system = len(segments(responses["system", 0]["cache"])[0])
    for (scope, turn), response in responses.items():
        assert_exact(response, oracle("tiny-llama"), strategy)
        assert statuses(response) == ["hit" if turn else "filled"] * 2
        if turn == 0:  # no composed block was reused; the system segment itself is the same in both scopes
            assert response["cache"]["tokens"]["reused"] == (num_system if scope == "isolated" else 0)
        else:
            assert response["cache"]["tokens"]["computed"] < len(segments(response["cache"])[2])
    by_scope = (responses["system", 0]["cache"], responses["isolated", 0]["cache"])
    keys = [{chunk["key"] for chunk in report["chunks"]} for report in by_scope]
    assert keys[0].isdisjoint(keys[1])


@pytest.mark.parametrize("scope", ["system", "isolated"])
def test_chunks_never_match_across_namespaces(scope, server, oracle, text):
    chunk, system = text(80), text(20)
    seen = []
    for namespace in ("one", "two", "one"):
        cache = {"scope": scope, "namespace": namespace}
        response = ask(server, "shared", [chunk], text(10), system=system, cache=cache)
        assert_exact(response, oracle("tiny-llama"), "shared")
        seen += statuses(response)
    assert seen == ["filled", "filled", "hit"]


@pytest.mark.parametrize("model", ["tiny-llama", QWEN3])
@pytest.mark.parametrize("strategy", ONE_OF_STRATEGIES)
def test_same_layout_repeated_and_second_question(model, strategy, server, oracle, text):
    """vLLM's prefix cache hits composed blocks of the same layout only."""
    chunks, question = [text(300), text(200)], text(200)
    first = ask(server, strategy, chunks, question)
    again = ask(server, strategy, chunks, question)
    other_question = ask(server, strategy, chunks, text(180))
    for response in (first, again, other_question):
        assert_exact(response, oracle(model), strategy)
    num_question = len(first["cache"]["segments"][-1]["token_ids"])
    assert again["cache"]["tokens"]["computed"] < num_question == other_question["cache"]["tokens"]["computed"] + 20


@pytest.mark.parametrize("strategy", ONE_OF_STRATEGIES)
def test_empty_system_prompt(strategy, server, oracle, text):
    chunks = [text(50), text(90)]
    for order in (chunks, chunks[::-1]):
        assert_exact(ask(server, strategy, order, text(15), system=""), oracle("tiny-llama"), strategy)


@pytest.mark.parametrize("model", ["tiny-llama", QWEN3, LLAMA_MHA, QWEN3_MHA])
def test_missing_cached_and_partly_cached(model, server, oracle, text):
    for strategy in STRATEGIES:
        system = f"You answer from documents about {text(8)}."
        a, b, c, d = (text(n) for n in (100, 37, 260, 64))
        first = ask(server, strategy, [a, b, c], text(20), system=system)
        assert statuses(first) == ["filled"] * 3
        assert_exact(first, oracle(model), strategy)
        cached = ask(server, strategy, [c, a, b], text(31), system=system)
        assert statuses(cached) == ["hit"] * 3
        assert cached["cache"]["tokens"]["computed"] == len(cached["cache"]["segments"][-1]["token_ids"])
        assert_exact(cached, oracle(model), strategy)
        some = ask(server, strategy, [b, d, a], text(9), system=system)
        assert statuses(some) == ["hit", "filled", "hit"]
        assert_exact(some, oracle(model), strategy)


@SMALL_STEPS
@pytest.mark.parametrize("model", ["tiny-llama", QWEN3])
@pytest.mark.parametrize("strategy", ONE_OF_STRATEGIES)
def test_chunk_lengths(model, strategy, server, oracle, text):
    """Around page size, block size, and longer than max_num_batched_tokens; a title makes the shortest chunks."""
    (found,) = set(re.findall(r'block_size="(\d+)"', server.client.get("/metrics").text))
    block = int(found)  # another one with `make test-gpu-runtime`
    other = text(45)
    for length in (3, 31, 32, 33, block - 1, block, block + 1, 1500):
        chunk = text(length - SUFFIX)
        for chunks in ([chunk], [other, chunk], [chunk, other]):
            response = ask(server, strategy, chunks, text(15))
            tokens = [c["tokens"] for c in response["cache"]["chunks"]]
            assert (-(-length // block) * block if IS_IN_PLACE else length) in tokens
            assert_exact(response, oracle(model), strategy)


@SMALL_STEPS
@pytest.mark.parametrize("model", ["tiny-llama", QWEN3])
@pytest.mark.parametrize("strategy", ONE_OF_STRATEGIES)
def test_chunked_prefill_with_a_budget_of_64(model, strategy, server, oracle, text):
    chunks = [text(n) for n in (200, 63, 65)]
    for question in (text(10), text(150)):
        assert_exact(ask(server, strategy, chunks, question), oracle(model), strategy)
        assert_exact(ask(server, strategy, chunks[::-1], question), oracle(model), strategy)


@pytest.mark.serve_with("--dtype", "bfloat16")
@pytest.mark.parametrize("model", ["tiny-llama", QWEN3])
@pytest.mark.parametrize("strategy", ONE_OF_STRATEGIES)
@pytest.mark.matrix
def test_bfloat16(model, strategy, server, oracle, text):
    """Rounding to bfloat16 costs an answer no more than it costs full attention on the same machine."""
    reused, full = [], []
    for _ in range(3):
        chunks, question = [text(n) for n in (120, 40, 77)], text(15)
        for order in (chunks, chunks[::-1]):
            reused += assert_exact(ask(server, strategy, order, question), oracle(model), strategy, tolerance=0.1)
            stock = ask(server, strategy, order, question, cache={"mode": "full"})
            expected = oracle(model).score("full", segments(stock["cache"]), stock["choices"][0]["token_ids"])
            full += [abs(a - b) for a, b in zip(token_logprobs(stock), expected.logprobs, strict=True)]
    assert mean(reused) <= 1.5 * mean(full)
