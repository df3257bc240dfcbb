# SPDX-License-Identifier: Apache-2.0
"""Everything at once, for minutes: answers as when sent alone, no leftovers, no unhandled errors.

``SOAK_MINUTES=30 pytest tests/engine/test_soak.py`` is the long form.
"""

import itertools
import os
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.engine.server import TesseraServer
from tests.support.churn import Churn, bodies, expected, outcome
from tests.support.small_pool import SMALL

Text = Callable[[int], str]

SECONDS = 60 * float(os.environ.get("SOAK_MINUTES", "1"))
CLIENTS, LEAVERS = 12, 4
WARM_UP = 0.5
"""Fraction of the time before memory and files are first counted, while libraries fill their caches."""
MORE_BYTES, MORE_FILES, MORE_TASKS = 128 << 20, 8, 4
LITTLE_KV = ("--kv-cache-memory-bytes", "64M")
"""Small, so that all of it is soon written and resident."""
UNHANDLED = re.compile(r"Traceback|never retrieved|Exception in ASGI|was destroyed but it is pending")


@pytest.fixture
def tier(tmp_path: Path) -> Path:
    folder = tmp_path / "tier"
    folder.mkdir()
    return folder


@contextmanager
def failing_now_and_then(folder: Path) -> Iterator[Counter[str]]:
    """Removes the tier's folder for one second out of six."""
    stopping, times = threading.Event(), Counter[str]()

    def fail() -> None:
        away = folder.with_name("away")
        while not stopping.wait(5):
            folder.rename(away)
            folder.write_text("no folder")
            stopping.wait(1)
            folder.unlink()
            away.rename(folder)
            times["gone"] += 1

    thread = threading.Thread(target=fail)
    thread.start()
    try:
        yield times
    finally:
        stopping.set()
        thread.join()


def leave(server: TesseraServer, asked: list[dict[str, Any]], seed: int, until: float) -> int:
    """Starts streams and disconnects from each after a delay; returns their number."""
    source, number = random.Random(seed), 0
    with httpx.Client(base_url=server.url, timeout=120) as client:
        while time.monotonic() < until:
            body = {**source.choice(asked), "stream": True, "max_tokens": 200}
            with client.stream("POST", "/v1/rag/chat", json=body) as response:
                for _ in itertools.islice(response.iter_lines(), source.randrange(20)):
                    pass
            number += 1
    return number


def ask(
    server: TesseraServer, asked: list[dict[str, Any]], seed: int, until: float
) -> list[tuple[int, str, list[float]]]:
    source, outcomes = random.Random(seed), []
    while time.monotonic() < until:
        index = source.randrange(len(asked))
        outcomes.append((index, *outcome(server, asked[index], len(outcomes))))
    return outcomes


def taken(server: TesseraServer) -> tuple[int, int]:
    """Memory and open files of the server's processes."""
    first = psutil.Process(server.process.pid)
    processes = [first, *first.children(recursive=True)]
    return sum(p.memory_info().rss for p in processes), sum(p.num_fds() for p in processes)


@pytest.mark.matrix
def test_soak(serve: Any, tier: Path, text: Text) -> None:
    server = serve("tiny-llama", *SMALL, *LITTLE_KV, "--chunk-cache-tiers", f"file://{tier}?size=4MiB")
    asked, tasks_before = bodies(text, random.Random(5)), server.metric("tessera_event_loop_tasks")
    churn = Churn(server, asked)
    churn.start()
    until = time.monotonic() + SECONDS
    try:
        with failing_now_and_then(tier) as times, ThreadPoolExecutor(CLIENTS + LEAVERS) as threads:
            asking = [threads.submit(ask, server, asked, seed, until) for seed in range(CLIENTS)]
            leaving = [threads.submit(leave, server, asked, seed, until) for seed in range(LEAVERS)]
            time.sleep(WARM_UP * SECONDS)
            bytes_before, files_before = taken(server)
            outcomes = [each for future in asking for each in future.result()]
            num_left = sum(future.result() for future in leaving)
    finally:
        churn.stopping.set()
        churn.join()
    stats = server.wait_idle()
    bytes_after, files_after = taken(server)
    modes = Counter(mode for _, mode, _ in outcomes)
    print(f"answers: {dict(modes)}, streams left: {num_left}, meanwhile: {dict(churn.done)}, tier: {dict(times)}")
    print(f"evicted: {stats['counters']['removals']['evicted']}, memory: {(bytes_after - bytes_before) >> 20:+} MiB")
    assert not churn.failures
    assert min(times["gone"], num_left, churn.done["clear"], len(outcomes)) >= 3, "the test shows less than it says"
    assert stats["counters"]["removals"]["evicted"] > 0
    assert stats["occupancy"]["pages_leased"] == 0

    server.post("/v1/cache/clear", {})
    alone = {mode: expected(server, asked, mode) for mode in ("chunked", "full")}
    for index, mode, logprobs in outcomes:
        if mode != "gone":
            assert logprobs == pytest.approx(alone[mode][index], abs=1e-4)
    assert server.metric("tessera_event_loop_tasks") <= tasks_before + MORE_TASKS
    assert files_after <= files_before + MORE_FILES
    assert bytes_after <= bytes_before + MORE_BYTES
    assert not UNHANDLED.search(server.log.read_text())
