# SPDX-License-Identifier: Apache-2.0
"""Preemption, disconnecting clients, small pools, and pages with wrong tags."""

import asyncio
from typing import Any

import httpx
import pytest

from tests.engine.server import TesseraServer
from tests.engine.sharing import SMALL_STEPS
from tests.support.concurrently import rag_body
from tests.support.exactness import ask, assert_exact
from tests.support.preemption import FEW_BLOCKS, Text, assert_exact_under_preemption, assert_nothing_is_left_behind
from tests.support.small_pool import PAGES, SMALL
from tests.support.waiting import until


@pytest.mark.serve_with(*FEW_BLOCKS, "--max-model-len", "640")
@pytest.mark.matrix  # tests/engine/test_decoding.py has preempted answers with the same blocks
def test_answers_stay_exact_under_preemption(server: TesseraServer, oracle: Any, text: Text) -> None:
    """With few KV blocks, vLLM preempts while decoding; preempted requests load again."""
    assert_exact_under_preemption(server, oracle("tiny-llama"), text)


@SMALL_STEPS
async def test_clients_that_leave_take_everything_with_them(server: TesseraServer, text: Text) -> None:
    """Disconnects during fill, load and decode leave no lease, engine request or page behind."""
    await assert_nothing_is_left_behind(server, text, longest=1200)


@SMALL_STEPS
async def test_a_fill_outlives_the_request_that_started_it(server: TesseraServer, oracle: Any, text: Text) -> None:
    chunks = [text(4000)]
    before = server.stats()["counters"]["fills"].get("succeeded", 0)

    async def until_leases(number: int) -> None:
        await asyncio.to_thread(until, lambda: server.occupancy()["leases"] >= number, 60)

    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        body = rag_body("System", chunks, "first", "shared")
        first = asyncio.create_task(client.post("/v1/rag/chat", json=body))
        await until_leases(1)
        waiting = asyncio.create_task(asyncio.to_thread(ask, server, "shared", chunks, "second", system="System"))
        await until_leases(2)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
    second = await waiting
    assert [chunk["status"] for chunk in second["cache"]["chunks"]] == ["waited"]
    assert_exact(second, oracle("tiny-llama"), "shared")
    stats = await asyncio.to_thread(server.wait_idle)
    assert stats["counters"]["fills"]["succeeded"] == before + 1


@pytest.mark.serve_with(*SMALL)
@pytest.mark.matrix
def test_pool_too_small_for_the_request(server: TesseraServer, oracle: Any, text: Text) -> None:
    """Fitting chunks are evicted and refilled; larger sets run in full attention."""
    assert server.stats()["occupancy"]["pages_total"] == PAGES
    server.post("/v1/cache/clear", {})
    before = server.stats()["counters"]["removals"].get("evicted", 0)
    chunks = [text(62) for _ in range(PAGES // 2)]  # two pages each, and the system segment has one
    for _ in range(2):
        for chunk in chunks:
            response = ask(server, "shared", [chunk, chunks[0]], text(10))
            assert_exact(response, oracle("tiny-llama"), "shared")
    assert server.stats()["counters"]["removals"]["evicted"] > before
    many = server.chat(chunks=chunks, question="?", max_tokens=1)["cache"]
    assert many["mode"] == "full"
    assert "more pages" in many["reason"]
    body = {"chunks": chunks, "question": "?", "max_tokens": 1, "cache": {"mode": "chunked"}}
    refused = server.post("/v1/rag/chat", body, status=400)
    assert refused["error"]["param"] == "cache.mode"
    server.wait_idle()
