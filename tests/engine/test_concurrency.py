# SPDX-License-Identifier: Apache-2.0
"""Concurrent requests: each answers as it does alone, and each chunk is computed once."""

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.engine.server import TesseraServer
from tests.support.concurrently import apart, chat_body, rag_body, run

Text = Callable[[int], str]


def test_32_requests_over_10_chunks(server: TesseraServer, text: Text) -> None:
    source = random.Random(7)
    system, chunks = f"System {text(20)}", [text(source.randrange(20, 300)) for _ in range(10)]
    requests: list[tuple[str, dict[str, Any], bool]] = []
    for i in range(32):
        if i % 4 == 3:
            requests.append(("/v1/chat/completions", chat_body(text(80)), i % 8 == 3))
        else:
            picked = source.sample(chunks, source.randrange(1, 6))
            body = rag_body(system, picked, text(30), ("shared", "offset")[i % 2])
            requests.append(("/v1/rag/chat", body, i % 3 == 0))
    before = server.wait_idle()["counters"]["fills"]
    with ThreadPoolExecutor(32) as threads:
        together = list(threads.map(lambda r: run(server, *r), requests))
    stats = server.wait_idle()
    used = {chunk for path, body, _ in requests if "rag" in path for chunk in body["chunks"]}
    assert stats["counters"]["fills"] == {**before, "succeeded": before.get("succeeded", 0) + len(used)}
    reports = [report for (path, *_), (_, report) in zip(requests, together, strict=True) if "rag" in path]
    assert {report["mode"] for report in reports} == {"chunked"}
    assert [chunk["status"] for report in reports for chunk in report["chunks"]].count("filled") == len(used)
    # Alone, in another namespace with other chunks and salts: nothing computed by the concurrent requests is reused.
    alone = [run(server, path, apart(body), stream) for path, body, stream in requests]
    for (logprobs, _), (expected, _) in zip(together, alone, strict=True):
        assert len(logprobs) == 6
        assert logprobs == pytest.approx(expected, abs=1e-4)
