#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measure what a budget of a quarter saves over all of 64 chunks of some 512 tokens, in one server, in turn.

    .venv/bin/python research/measure_sparse_speed.py [MODEL] [FLAG ...]

Times to first token and per output token, with chunks in the pool and in host memory only; and how many requests run at
once. Prints ratios: with the budget over without.
"""

import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from app.models.random_model import build_preset
from machine.http_client import http_client
from machine.server_process import ServerProcess

ROUNDS, CHUNKS, CHUNK_TOKENS, TOKENS, AT_ONCE, SHARE = 4, 64, 500, 32, 16, 0.25
CLIENTS = 4
"""Clients at once for the time per output token: as many as the KV memory has room for without a budget."""
FLAGS = (
    *("--dtype", "float32", "--max-model-len", "40960", "--chunk-mode", "window"),
    *("--kv-cache-memory-bytes", "3G"),
    *("--chunk-cache-memory", "2GiB", "--chunk-cache-tiers", "host://?size=2GiB"),
)
WAYS: dict[str, dict[str, Any]] = {"all": {}, "budget": {"sparse": {"budget_share": SHARE}}}


def text(seed: str, words: int) -> str:
    letters = random.Random(seed)
    return " ".join("".join(letters.choices("aeioulnrst", k=4)) for _ in range(words))


class Client:
    """Requests to the server."""

    def __init__(self, server: ServerProcess) -> None:
        self._http = http_client(server.url, timeout=1200)
        sample = self._http.post("/tokenize", json={"prompt": text("sample", 100), "add_special_tokens": False}).json()
        words = 100 * CHUNK_TOKENS // sample["count"]
        self._chunks = [text(f"chunk {number}", words) for number in range(CHUNKS)]
        self._count = itertools.count()

    def answer(self, way: str, tokens: int = TOKENS) -> tuple[float, float, dict[str, Any]]:
        """Seconds to the first token and per later one, and the report."""
        count = next(self._count)  # the order of the chunks, and the question
        body = {
            "chunks": random.Random(count).sample(self._chunks, CHUNKS),  # no blocks of vLLM's are shared
            "question": text(f"question {count}", 12),
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": True,
            "cache": WAYS[way],
        }
        started, times = time.perf_counter(), list[float]()
        report: dict[str, Any] = {}
        with self._http.stream("POST", "/v1/rag/chat", json=body) as response:
            if response.is_error:
                raise SystemExit(response.read().decode())
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                report = event.get("cache") or report
                if event.get("choices") and event["choices"][0]["delta"].get("content"):
                    times.append(time.perf_counter())
        assert report["mode"] == "chunked", report
        assert ("left_out" in report["tokens"]) == (way == "budget"), report
        return times[0] - started, (times[-1] - times[0]) / max(1, len(times) - 1), report

    def answer_together(self, way: str) -> float:
        """Mean seconds per output token of clients at once."""
        with ThreadPoolExecutor(CLIENTS) as threads:
            return statistics.fmean(each[1] for each in threads.map(self.answer, [way] * CLIENTS))

    def put_to_sleep(self) -> None:
        """Takes all chunks out of the pool, once they are in host memory."""
        while self._http.get("/v1/cache/stats").json()["occupancy"]["archive_waiting"]:
            time.sleep(0.2)
        slept = self._http.post("/v1/cache/sleep", json={"idle_s": 0}).json()
        assert slept["segments"] >= CHUNKS, slept

    def most_running(self, way: str) -> int:
        """Requests that run at once, of many."""
        with ThreadPoolExecutor(AT_ONCE) as threads:
            futures = [threads.submit(self.answer, way) for _ in range(AT_ONCE)]
            most = 0
            while not all(future.done() for future in futures):
                most = max(most, self._running())
                time.sleep(0.2)
            for future in futures:
                future.result()
        return most

    def _running(self) -> int:
        families = text_string_to_metric_families(self._http.get("/metrics").text)
        return int(sum(s.value for family in families for s in family.samples if s.name == "vllm:num_requests_running"))


@contextmanager
def serving(model: str, flags: list[str]) -> Iterator[Client]:
    with tempfile.TemporaryDirectory() as folder:
        server = ServerProcess(Path(folder) / "server.log", model, *FLAGS, *flags)
        try:
            yield Client(server.wait_ready())
        finally:
            server.stop()


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else str(build_preset("bench-100m"))
    with serving(model, sys.argv[2:]) as client:
        for way in WAYS:
            _, _, report = client.answer(way)
        print(f"{report['tokens']}", flush=True)
        found: dict[str, list[float]] = defaultdict(list)
        for number in range(ROUNDS):
            seen: dict[str, dict[str, float]] = defaultdict(dict)
            for way in WAYS if number % 2 else reversed(WAYS):
                seen["time to first token"][way], seen["time per output token"][way], _ = client.answer(way)
                seen[f"time per output token, {CLIENTS} clients"][way] = client.answer_together(way)
                client.put_to_sleep()
                seen["time to first token from host memory"][way], _, _ = client.answer(way)
                client.answer("all", 8)  # all chunks are in the pool again
            for name, times in seen.items():
                found[name].append(times["budget"] / times["all"])
                told = ", ".join(f"{way} {1e3 * seconds:.0f} ms" for way, seconds in sorted(times.items()))
                print(f"{name}: {found[name][-1]:.3f} ({told})", flush=True)
        running = {way: client.most_running(way) for way in WAYS}
        medians = {name: round(statistics.median(ratios), 3) for name, ratios in found.items()}
        print(json.dumps({**medians, "requests at once": running}))


if __name__ == "__main__":
    main()
