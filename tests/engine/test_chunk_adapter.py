# SPDX-License-Identifier: Apache-2.0
"""An adapter that runs only where chunks are computed: exact, and everything else as without it."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.engine.server import TesseraServer
from tests.support.adapters import ChunkAdapter
from tests.support.exactness import (
    STRATEGIES,
    ask,
    assert_exact,
    assert_filled_hit_and_mixed_are_exact,
    assert_scored,
    statuses,
)
from tests.support.preemption import FEW_BLOCKS as BLOCKS
from tests.support.small_pool import SMALL
from tests.support.tier_servers import archived, origins, to_sleep

FEW_BLOCKS = (*BLOCKS, "--max-model-len", "700")
Serve = Callable[..., TesseraServer]
pytestmark = pytest.mark.matrix


@pytest.fixture(scope="module")
def adapter(model_path: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> ChunkAdapter:
    return ChunkAdapter.make("writer", model_path("tiny-llama"), tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def tier(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    url = f"file://{tmp_path_factory.mktemp('tier')}/kv?size=1GiB&timeout=20"
    return "--chunk-cache-tiers", url


@pytest.fixture
def adapted(serve: Serve, adapter: ChunkAdapter, tier: tuple[str, ...]) -> TesseraServer:
    return serve("tiny-llama", "--chunk-adapter", str(adapter.folder), *tier, *FEW_BLOCKS)


@pytest.fixture
def plain(serve: Serve, tier: tuple[str, ...]) -> TesseraServer:
    return serve("tiny-llama", *tier, *FEW_BLOCKS)


def test_filled_hit_and_mixed(adapted, adapter, oracle, text):
    assert_filled_hit_and_mixed_are_exact(adapted, adapter.oracle, text)
    answer = ask(adapted, "offset", [text(80), text(60)], text(15))
    assert answer["cache"]["adapter"]
    with pytest.raises(AssertionError):  # the adapter matters
        assert_exact(answer, oracle("tiny-llama"), "offset", tolerance=0.1)


@pytest.mark.parametrize("cache", [{"scope": "isolated"}, {"recompute": 0.5}, {"sparse": {"budget_share": 0.6}}])
def test_contexts_and_other_options(cache, adapted, adapter, text):
    """The plain model computes the tokens before a chunk, and windows behind other chunks."""
    chunks: list[Any] = [{"text": text(50), "context": text(70)}, text(70), text(40)]
    for status in ("filled", "hit"):
        response = ask(adapted, "offset", chunks, text(12), cache=cache)
        assert status in statuses(response)
        assert_exact(response, adapter.oracle, "offset")
    assert_exact(ask(adapted, "offset", chunks, text(12), cache=cache, system=""), adapter.oracle, "offset")


def test_the_same_tokens_behind_other_system_segments(adapted, adapter, text):
    """A token of the chunk in one request is one of the system segment in another."""
    words = text(120)
    for end in (40, 41, 72):
        response = ask(adapted, "offset", [words[end:]], text(9), system=words[:end])
        assert_exact(response, adapter.oracle, "offset")


def test_ordinary_requests_are_bit_for_bit_those_of_a_server_without_it(adapted, plain, text):
    bodies = [{"messages": [{"role": "user", "content": text(length)}]} for length in (20, 150)]
    full = {"system": "Answer.", "chunks": [text(90)], "question": text(9), "cache": {"mode": "full"}}
    given = {"max_tokens": 12, "temperature": 0, "logprobs": True, "top_logprobs": 5}

    def answers(server: TesseraServer) -> list[Any]:
        found = [server.post("/v1/chat/completions", {**body, **given}) for body in bodies]
        found.append(server.post("/v1/rag/chat", {**full, **given}))
        return [answer["choices"][0]["logprobs"] for answer in found]

    expected = answers(plain)
    assert answers(adapted) == expected
    ask(adapted, "offset", [full["chunks"][0]], text(9), system="Answer.")
    assert answers(adapted) == expected


def test_ordinary_requests_beside_fills(adapted, adapter, oracle, text):
    """Steps with and without the adapter at once, and preempted requests."""
    before = adapted.metric("vllm:num_preemptions_total")

    def send(number: int) -> tuple[dict[str, Any], bool]:
        is_full = bool(number % 2)
        cache = {"mode": "full"} if is_full else {}
        return ask(adapted, "offset", [text(60), text(40)], text(9), max_tokens=60, cache=cache), is_full

    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(send, range(16)))
    assert adapted.metric("vllm:num_preemptions_total") > before, "vLLM did not preempt; the test shows less"
    for answer, is_full in answers:
        if is_full:
            assert_scored(answer, oracle("tiny-llama"))
        else:
            assert_exact(answer, adapter.oracle, "offset", steps=60)


def test_from_a_tier_and_never_without_the_adapter(adapted, plain, adapter, oracle, text):
    chunks, system = [text(60), text(100)], text(20)
    ask(adapted, "offset", chunks, text(9), system=system)
    to_sleep(adapted)
    response = ask(adapted, "offset", chunks[::-1], text(9), system=system)
    assert origins(response) == ["file", "file"]
    assert_exact(response, adapter.oracle, "offset")
    response = ask(plain, "offset", chunks, text(9), system=system)
    assert origins(response) == ["filled", "filled"]
    assert_exact(response, oracle("tiny-llama"), "offset")
    assert "adapter" not in response["cache"]
    archived(plain)


@pytest.mark.parametrize("placement", ["in-place", "attend"])
def test_placements_and_evictions(placement, serve, adapter, oracle, text):
    flags = ("--chunk-cache-placement", placement, "--block-size", "32", *SMALL)
    server = serve("tiny-llama", "--chunk-adapter", str(adapter.folder), *flags)
    assert ask(server, "parallel", [text(9), text(9)], "?")["cache"]["placement"] == placement
    chunks = [text(58) for _ in range(24)]
    for strategy in STRATEGIES if placement == "attend" else ["parallel"]:
        for first in (0, 8, 16, 0):
            some = chunks[first : first + 8]
            for order in (some, some[::-1]):
                assert_exact(ask(server, strategy, order, text(9)), adapter.oracle, strategy)
        # An ordinary prompt of the same tokens has blocks of its own.
        full = ask(server, strategy, chunks[:1], text(9), cache={"mode": "full"})
        assert_scored(full, oracle("tiny-llama"))
    assert server.stats()["counters"]["removals"]["evicted"]
