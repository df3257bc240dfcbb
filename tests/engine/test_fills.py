# SPDX-License-Identifier: Apache-2.0
"""Fills under concurrent requests: each chunk is computed once despite disconnects and clearing."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from tests.engine.server import TesseraServer, engine_core, token_logprobs
from tests.engine.sharing import SMALL_STEPS
from tests.processes import frozen
from tests.support.concurrently import apart, rag_body, run
from tests.support.exactness import ask, assert_exact, statuses
from tests.support.waiting import until

pytestmark = SMALL_STEPS


@asynccontextmanager
async def client_of(server: TesseraServer) -> AsyncIterator[httpx.AsyncClient]:
    """A client with one connection per request."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=300, limits=limits) as client:
        yield client


async def answer(client: httpx.AsyncClient, body: dict[str, Any], stream: bool = False) -> dict[str, Any]:
    """Log probabilities and report, read as a stream or at once."""
    response = await client.post("/v1/rag/chat", json={**body, "stream": stream})
    assert response.status_code == 200, response.text
    if not stream:
        return {"logprobs": token_logprobs(response.json()), "cache": response.json()["cache"]}
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    parts = [choice.get("logprobs") or {} for event in events for choice in event["choices"]]
    logprobs = [entry["logprob"] for part in parts for entry in part.get("content") or ()]
    return {"logprobs": logprobs, "cache": events[-1]["cache"]}


def fills(server: TesseraServer) -> dict[str, int]:
    return {name: server.wait_idle()["counters"]["fills"].get(name, 0) for name in ("succeeded", "failed", "aborted")}


def more(after: dict[str, int], before: dict[str, int]) -> dict[str, int]:
    return {name: after[name] - before[name] for name in after}


async def test_whoever_started_the_fills_may_leave_at_any_time(server, oracle, text):
    """Before, while and after other requests wait: these answer exactly, and nothing is left over."""
    system, chunks = text(10), [text(700), text(500)]
    bodies = [rag_body(system, order, text(12), name) for order, name in ((chunks, "shared"), (chunks[::-1], "offset"))]
    alone = [(await asyncio.to_thread(run, server, "/v1/rag/chat", apart(body), False))[0] for body in bodies]
    seen: list[str] = []
    async with client_of(server) as client:
        for i, delay_s in enumerate([0, 0.005, 0.01, 0.02, 0.03, 0.05, 0.08, 0.12, 0.18, 0.25, 0.35, 0.5]):
            cache = [{**body["cache"], "namespace": f"leaving {i}"} for body in bodies]
            left = {**bodies[0], "cache": cache[0], "max_tokens": 60}
            starter = asyncio.create_task(answer(client, left, stream=bool(i // 2 % 2)))
            await asyncio.sleep((i % 3) * 0.02)
            others = [
                asyncio.create_task(answer(client, {**body, "cache": options}, bool(i % 2) == (n == 0)))
                for n, (body, options) in enumerate(zip(bodies, cache, strict=True))
            ]
            await asyncio.sleep(delay_s)
            starter.cancel()
            for response, expected in zip(await asyncio.gather(*others), alone, strict=True):
                assert response["cache"]["mode"] == "chunked"
                assert response["logprobs"] == pytest.approx(expected, abs=1e-4)
                seen += statuses(response)
            await asyncio.gather(starter, return_exceptions=True)
    assert {"filled", "waited"} <= set(seen), "no one waited; the test shows less than it says"
    stats = await asyncio.to_thread(server.wait_idle)
    assert stats["occupancy"]["pages_leased"] == 0
    assert_exact(
        await asyncio.to_thread(ask, server, "shared", chunks, "still?", system=system), oracle("tiny-llama"), "shared"
    )


async def test_all_who_wait_leave_and_the_fills_end(server, text):
    before, body = fills(server), rag_body(text(10), [text(2000), text(1500)], "?", "shared")
    with frozen(engine_core(server)):  # no fill ends before they have left
        async with client_of(server) as client:
            tasks = [asyncio.create_task(answer(client, body, bool(i % 2))) for i in range(6)]
            await asyncio.to_thread(until_filling, server, 3)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.to_thread(until, lambda: not server.occupancy()["leases"])
    assert more(await asyncio.to_thread(fills, server), before) == {"succeeded": 0, "failed": 0, "aborted": 2}
    plan = server.post("/v1/rag/plan", body)
    assert [chunk["status"] for chunk in plan["chunks"]] == ["missing"] * 2


def until_filling(server: TesseraServer, segments: int = 1) -> None:
    until(lambda: server.occupancy()["segments_filling"] >= segments, why="no fill began")


class Ingesting(threading.Thread):
    """A concurrent `POST /v1/rag/chunks`; `lines` has the lines received so far, including the summary."""

    def __init__(self, server: TesseraServer, **body: Any) -> None:
        super().__init__()
        self.client = httpx.Client(base_url=server.url, timeout=300)
        self.body = body
        self.lines: list[dict[str, Any]] = []

    def run(self) -> None:
        with self.client, self.client.stream("POST", "/v1/rag/chunks", json=self.body) as response:
            self.lines += map(json.loads, response.iter_lines())


def test_a_plan_says_what_is_being_computed(server, text):
    system, chunks = text(10), [text(2500), text(20)]
    ingesting = Ingesting(server, chunks=chunks[:1], system=system)
    ingesting.start()
    until_filling(server)
    body = rag_body(system, chunks, "?", "shared")
    plan = server.post("/v1/rag/plan", body)
    response = server.post("/v1/rag/chat", body)
    ingesting.join()
    assert [chunk["status"] for chunk in plan["chunks"]] == ["filling", "missing"]
    assert statuses(response) == ["waited", "filled"]
    assert ingesting.lines[0]["status"] == "filled"


def test_clearing_during_an_ingestion_is_said_in_its_lines(server, oracle, text):
    """A request that waits for a chunk still answers with it after the cache is cleared."""
    system, chunks = text(10), [text(3000), text(3000), text(3000), text(40)]
    ingesting = Ingesting(
        server, chunks=[{"id": f"c{i}", "text": chunk} for i, chunk in enumerate(chunks)], system=system
    )
    answers: list[dict[str, Any]] = []
    waiting = threading.Thread(target=lambda: answers.append(ask(server, "shared", chunks[:1], "?", system=system)))
    ingesting.start()
    until_filling(server, 3)  # the system segment, and the two chunks of the first round
    waiting.start()
    until(lambda: server.occupancy()["leases"] >= 3)
    cleared = server.post("/v1/cache/clear", {})["cleared"]
    ingesting.join()
    waiting.join()
    *lines, summary = ingesting.lines
    assert cleared >= 3
    assert [line["status"] for line in lines] == ["failed", "failed", "filled", "filled"]
    assert [line.get("error") for line in lines] == ["it was removed while it was computed"] * 2 + [None] * 2
    assert [line["progress"]["done"] for line in lines] == [1, 2, 3, 4]
    assert (summary["summary"]["failed"], summary["summary"]["cached"]) == (2, 2)
    assert statuses(answers[0]) == ["waited"]
    assert_exact(answers[0], oracle("tiny-llama"), "shared")
    for pair, status in ((chunks[:2], "missing"), (chunks[2:], "hit")):
        plan = server.post("/v1/rag/plan", rag_body(system, pair, "?", "shared"))
        assert [chunk["status"] for chunk in plan["chunks"]] == [status] * 2
    server.post("/v1/rag/plan", {"chunks": [{"id": "c0"}], "question": "?"}, status=404)
    server.post("/v1/rag/plan", {"chunks": [{"id": "c2"}], "question": "?"})


def test_a_client_that_leaves_ends_its_ingestion(server, text):
    """Finished chunks stay, running fills are aborted, and the rest never starts."""
    chunks, before = [text(3000) for _ in range(8)], fills(server)
    with server.client.stream("POST", "/v1/rag/chunks", json={"chunks": chunks, "system": "leaving"}) as response:
        lines = response.iter_lines()  # kept: closing it would close the connection
        first = json.loads(next(lines))
        until_filling(server)
    done = more(fills(server), before)
    assert first["status"] == "filled"
    assert done["aborted"] > 0
    assert done["succeeded"] + done["aborted"] < len(chunks)
    plan = server.post("/v1/rag/plan", {"chunks": chunks[:2], "question": "?", "system": "leaving"})
    assert plan["chunks"][0]["status"] == "hit"


def test_a_request_that_waits_for_an_abandoned_ingestion_gets_its_chunk(server, oracle, text):
    chunk, answers = text(4000), []
    waiting = threading.Thread(target=lambda: answers.append(ask(server, "offset", [chunk], "?", system="waiting")))
    with httpx.Client(base_url=server.url, timeout=300) as leaving:
        body = {"chunks": [text(3000), text(3000), chunk], "system": "waiting"}
        request = leaving.build_request("POST", "/v1/rag/chunks", json=body)
        response = leaving.send(request, stream=True)  # returns with the lines of the first round
        until_filling(server)
        waiting.start()
        until(lambda: server.occupancy()["leases"] >= 2)
        response.close()
    waiting.join()
    assert statuses(answers[0]) == ["waited"]
    assert_exact(answers[0], oracle("tiny-llama"), "offset")
