# SPDX-License-Identifier: Apache-2.0
"""Clearing, deleting, expiring, pinning, ingesting and evicting while requests run never changes an answer."""

import itertools
import json
import random
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.engine.server import TesseraServer
from tests.support.churn import Churn, Text, bodies, expected, outcome
from tests.support.concurrently import chat_body, run
from tests.support.exactness import ask, assert_exact
from tests.support.small_pool import SMALL

REQUESTS, ROUNDS = 160, 3
"""Minimum number of requests, and of each kind of disturbance."""


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
