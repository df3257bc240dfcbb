# SPDX-License-Identifier: Apache-2.0
"""Requests while chunks come and go."""

import random
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx

from tests.engine.server import TesseraServer
from tests.support.concurrently import rag_body, run

Text = Callable[[int], str]
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


def expected(server: TesseraServer, asked: list[dict[str, Any]], mode: str) -> list[list[float]]:
    """Each request's answer when sent alone, in an empty namespace."""
    made = []
    for i, body in enumerate(asked):
        cache = {**body["cache"], "namespace": f"alone {i}", "mode": mode}
        made.append(run(server, "/v1/rag/chat", {**body, "cache": cache}, False)[0])
    return made
