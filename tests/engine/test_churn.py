# SPDX-License-Identifier: Apache-2.0
"""Clearing, deleting, expiring, pinning, ingesting and evicting while requests run never changes an answer."""

import itertools
import json
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.engine.server import TesseraServer
from tests.engine.test_chunks_api import SMALL
from tests.engine.test_concurrency import chat_body, rag_body, run
from tests.engine.test_exactness import ask, assert_exact

Text = Callable[[int], str]

REQUESTS, ROUNDS = 160, 3
"""Minimum number of requests, and of each kind of disturbance."""
NAMESPACES = ("default", "other")


def bodies(text: Text, source: random.Random) -> list[dict[str, Any]]:
    """Two dozen requests over eight documents (one of them in parts), with all strategies, scopes and namespaces."""
    systems = [text(20), text(35), ""]
    documents = [{"id": f"d{i}", "text": text(source.randrange(10, 60))} for i in range(7)]
    documents.append({"id": "long", "text": text(150)})
    made = []
    for i in range(24):
        picked = source.sample(documents, source.randrange(1, 5))
        body = rag_body(systems[i % 3], picked, text(15), ("shared", "offset")[i % 2])
        body["cache"] |= {"scope": ("system", "isolated")[i // 2 % 2], "namespace": NAMESPACES[i // 4 % 2]}
        made.append(body)
    return made


class Churn(threading.Thread):
    """Disturbs the cache in every way in turn until stopped; `done` counts the disturbances."""

    def __init__(self, server: TesseraServer, asked: list[dict[str, Any]]) -> None:
        super().__init__()
        self.client = httpx.Client(base_url=server.url, timeout=120)
        self.asked = asked
        self.source = random.Random(11)
        self.stopping = threading.Event()
        self.done: Counter[str] = Counter()
        self.failures: list[str] = []

    def run(self) -> None:
        ways = [self.ingest, self.delete, self.expire, self.pin, self.delete, self.clear_one, self.ingest, self.clear]
        with self.client:
            while not self.stopping.is_set():
                for way in ways:
                    self.check(way())
                    self.done[way.__name__] += 1

    def check(self, response: httpx.Response) -> None:
        if response.status_code not in (200, 404):
            self.failures.append(response.text)

    def ingest(self, **fields: Any) -> httpx.Response:
        body = self.source.choice(self.asked)
        return self.client.post(
            "/v1/rag/chunks", json={name: body[name] for name in ("system", "chunks", "cache")} | fields
        )

    def expire(self) -> httpx.Response:
        return self.ingest(ttl_s=0.05)

    def pin(self) -> httpx.Response:
        return self.ingest(pin=True, ttl_s=0.5)

    def clear(self) -> httpx.Response:
        return self.client.post("/v1/cache/clear")

    def clear_one(self) -> httpx.Response:
        return self.client.post("/v1/cache/clear", json={"namespace": NAMESPACES[0]})

    def delete(self) -> httpx.Response:
        listed = self.client.get("/v1/rag/chunks", params={"limit": 1000}).json()["data"]
        if not listed:
            return self.client.get("/v1/cache/stats")
        return self.client.delete(f"/v1/rag/chunks/{self.source.choice(listed)['key']}")


def by_id(body: dict[str, Any]) -> dict[str, Any]:
    return {**body, "chunks": [{"id": chunk["id"]} for chunk in body["chunks"]]}


def outcome(server: TesseraServer, body: dict[str, Any], how: int) -> tuple[str, list[float]]:
    """Sends a request whole, as a stream, or by known ids without texts; returns mode and answer."""
    if how % 3 < 2:
        logprobs, report = run(server, "/v1/rag/chat", body, stream=how % 3 == 1)
        return report["mode"], logprobs
    response = server.client.post("/v1/rag/chat", json=by_id(body))
    if response.status_code in (404, 410):
        return "gone", []
    answer = response.json()
    assert response.status_code == 200, answer
    return answer["cache"]["mode"], [entry["logprob"] for entry in answer["choices"][0]["logprobs"]["content"]]


def ask_until(
    churn: Churn, server: TesseraServer, asked: list[dict[str, Any]], numbers: Iterable[int]
) -> list[tuple[int, str, list[float]]]:
    """Outcomes by index of the request, until there were enough requests and disturbances."""
    outcomes = []
    for number in numbers:
        if number >= REQUESTS and (churn.done["clear"] >= ROUNDS or not churn.is_alive()):
            return outcomes
        index = random.Random(number).randrange(len(asked))
        outcomes.append((index, *outcome(server, asked[index], number)))
    raise AssertionError("numbers have an end")


@pytest.mark.serve_with(*SMALL)
@pytest.mark.matrix
def test_answers_stay_exact_whatever_happens_to_the_cache(server: TesseraServer, oracle: Any, text: Text) -> None:
    source = random.Random(5)
    asked, plain = bodies(text, source), chat_body(text(80))
    before = server.wait_idle()["counters"]["removals"]
    churn = Churn(server, asked)
    churn.start()
    try:
        with ThreadPoolExecutor(9) as threads:
            plains = [threads.submit(run, server, "/v1/chat/completions", plain, False) for _ in range(8)]
            asking = [threads.submit(ask_until, churn, server, asked, itertools.count(n, 8)) for n in range(8)]
            outcomes = [each for future in asking for each in future.result()]
    finally:
        churn.stopping.set()
        churn.join()
    assert not churn.failures
    stats = server.wait_idle()
    assert stats["occupancy"]["pages_leased"] == 0
    removals = {why for why, count in stats["counters"]["removals"].items() if count > before.get(why, 0)}
    assert {"cleared", "deleted", "expired"} <= removals, "the test shows less than it says"

    server.post("/v1/cache/clear", {})
    alone = {"chunked": expected(server, asked, "chunked"), "full": expected(server, asked, "full")}
    modes = Counter(mode for _, mode, _ in outcomes)
    assert modes["chunked"] > REQUESTS / 3, modes
    for index, mode, logprobs in outcomes:
        if mode != "gone":
            assert logprobs == pytest.approx(alone[mode][index], abs=1e-4)
    logprobs, _ = run(server, "/v1/chat/completions", plain, False)
    assert all(future.result()[0] == pytest.approx(logprobs, abs=1e-4) for future in plains)
    for body in asked[:8]:
        strategy, cache = body["cache"]["position_strategy"], body["cache"]
        response = ask(server, strategy, body["chunks"], body["question"], system=body["system"], cache=cache)
        assert_exact(response, oracle("tiny-llama"), strategy)


def expected(server: TesseraServer, asked: list[dict[str, Any]], mode: str) -> list[list[float]]:
    """Each request's answer when sent alone, in an empty namespace."""
    made = []
    for i, body in enumerate(asked):
        cache = {**body["cache"], "namespace": f"alone {i}", "mode": mode}
        made.append(run(server, "/v1/rag/chat", {**body, "cache": cache}, False)[0])
    return made


@pytest.mark.serve_with(*SMALL)
def test_an_id_given_two_texts_at_the_same_time_has_one(server: TesseraServer, text: Text) -> None:
    """Calls that come too late report it, and pin no chunk under the id."""
    server.post("/v1/cache/clear", {})
    texts = [text(40), text(40)]

    def give(i: int) -> list[dict[str, Any]]:
        chunks = [text_of(i), {"id": "doc", "text": texts[i % 2]}]
        response = server.client.post("/v1/rag/chunks", json={"chunks": chunks, "pin": True})
        return [json.loads(line) for line in response.text.splitlines()] if response.status_code == 200 else []

    def text_of(i: int) -> str:
        return f"{i} and more"

    with ThreadPoolExecutor(8) as threads:
        calls = list(threads.map(give, range(8)))
    keys = {line["key"] for call in calls for line in call[:-1] if line["id"] == "doc" and line["status"] != "failed"}
    assert len(keys) == 1
    pinned = server.get("/v1/rag/chunks", pinned="true", kind="chunk")["data"]
    assert {entry["key"] for entry in pinned if entry["ids"]} == keys
    losers = {line["key"] for call in calls for line in call[:-1] if line["id"] == "doc"} - keys
    assert losers.isdisjoint(entry["key"] for entry in pinned)
    server.post("/v1/cache/clear", {})
