# SPDX-License-Identifier: Apache-2.0
"""Answers under preemption, and the state that they leave."""

import asyncio
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.engine.server import TesseraServer
from tests.oracle import Oracle
from tests.support.concurrently import apart, rag_body, run
from tests.support.exactness import ask, assert_exact

Text = Callable[[int], str]
FEW_BLOCKS = ("--num-gpu-blocks-override", "24", "--block-size", "32")


def assert_exact_under_preemption(server: TesseraServer, oracle: Oracle, text: Text) -> None:
    """Needs a server with ``FEW_BLOCKS``, of which each of 8 answers needs up to 9."""
    system, chunks = text(10), [text(60), text(40)]
    warm = server.post("/v1/rag/chat", rag_body(system, chunks, "warm up", "shared"))
    assert warm["cache"]["mode"] == "chunked"
    bodies = [
        {**rag_body(system, order, f"{i} {text(10)}", strategy), "max_tokens": 90}
        for i, (order, strategy) in enumerate([(chunks, "shared"), (chunks[::-1], "offset")] * 4)
    ]
    before = server.metric("vllm:num_preemptions_total")
    with ThreadPoolExecutor(len(bodies)) as threads:
        together = list(threads.map(lambda body: run(server, "/v1/rag/chat", body, False), bodies))
    assert server.metric("vllm:num_preemptions_total") > before, "vLLM did not preempt; the test shows nothing"
    for body, (logprobs, report) in zip(bodies, together, strict=True):
        assert report["mode"] == "chunked"
        assert len(logprobs) == 90
        assert logprobs == pytest.approx(run(server, "/v1/rag/chat", apart(body), False)[0], abs=1e-4)
    response = ask(server, "shared", chunks, "after all", system=system)
    assert_exact(response, oracle, "shared")
    server.wait_idle()


async def _leave_after(server: TesseraServer, body: dict[str, Any], delay_s: float, stream: bool) -> None:
    """Sends a request and disconnects after a delay or after the first event."""
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        task = asyncio.create_task(client.post("/v1/rag/chat", json={**body, "stream": stream}))
        await asyncio.sleep(delay_s)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _leave_while_decoding(server: TesseraServer, body: dict[str, Any]) -> None:
    async with (
        httpx.AsyncClient(base_url=server.url, timeout=60) as client,
        client.stream("POST", "/v1/rag/chat", json={**body, "stream": True}) as response,
    ):
        lines = response.aiter_lines()
        for _ in range(6):
            await anext(lines)


async def assert_nothing_is_left_behind(server: TesseraServer, text: Text, longest: int) -> None:
    """Needs a server with ``SMALL_STEPS``; ``longest`` is the length of a chunk."""
    source = random.Random(3)

    def body(chunks: list[str]) -> dict[str, Any]:
        return {**rag_body("System", chunks, text(10), "shared"), "max_tokens": longest // 3}

    for _ in range(4):
        leaving = [
            _leave_after(server, body([text(longest), text(2 * longest // 3)]), source.uniform(0, 0.6), bool(i % 2))
            for i in range(6)
        ]
        await asyncio.gather(*leaving)
    cached = [text(longest // 2), text(longest // 4)]
    await asyncio.to_thread(server.post, "/v1/rag/chat", {**body(cached), "max_tokens": 1})
    await asyncio.gather(*(_leave_after(server, body(cached), source.uniform(0, 0.2), True) for _ in range(6)))
    await asyncio.gather(*(_leave_while_decoding(server, body(cached)) for _ in range(4)))
    stats = await asyncio.to_thread(server.wait_idle)
    assert stats["counters"]["fills"].get("aborted"), "no fill was aborted; the test shows less than it says"
    occupancy = stats["occupancy"]
    assert occupancy["pages_leased"] == 0
    response = await asyncio.to_thread(ask, server, "shared", cached, "still exact?", system="System")
    assert [chunk["status"] for chunk in response["cache"]["chunks"]] == ["hit", "hit"]
