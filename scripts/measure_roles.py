#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measure how new chunks slow running answers, with and without replicas that prefill.

    .venv/bin/python scripts/measure_roles.py [MODEL]

An answer is streamed while other requests bring 50 new chunks, again and again: by two replicas with roles, and by one
that does everything. The control, with roles: the replica that prefills computes chunks for nobody, which shows the
price of two busy processes on this machine. Prints medians of the time per output token, relative to a quiet server's.
"""

import json
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path

import httpx

from app.commands.cluster import shares
from app.models.default_model import default_model
from tools.redis_process import local_redis
from tools.server_process import ServerProcess

ROUNDS, CHUNKS, REQUESTS, WORDS, TOKENS = 5, 50, 10, 120, 120
SECRET = {"TESSERA_PEER_SECRET": "of these replicas alone"}
Work = Callable[[], None]


def text(number: int) -> str:
    words = random.Random(number)
    return " ".join("".join(words.choices("aeioulnrst", k=5)) for _ in range(WORDS))


class Client:
    """Requests to one server."""

    def __init__(self, url: str, model: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=600)
        self._model = model
        self._numbers = iter(range(1 << 30))

    def per_token(self) -> float:
        """The median time between tokens of a streamed answer, in seconds."""
        body = {"model": self._model, "prompt": "Once upon a time", "max_tokens": TOKENS, "ignore_eos": True}
        times = []
        with self._http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    times.append(time.perf_counter())
        return statistics.median(b - a for a, b in pairwise(times))

    def new_chunks(self) -> None:
        """Requests with new chunks, one after another."""
        each = CHUNKS // REQUESTS
        for _ in range(REQUESTS):
            chunks = [text(next(self._numbers)) for _ in range(each)]
            body = {"model": self._model, "chunks": chunks, "question": "What?", "max_tokens": 1}
            self._http.post("/v1/rag/chat", json=body).raise_for_status()


@contextmanager
def repeated(work: Work) -> Iterator[list[float]]:
    """Repeats ``work`` in a thread; yields the seconds that each time took."""
    over, took = threading.Event(), []

    def run() -> None:
        while not over.is_set():
            started = time.perf_counter()
            work()
            took.append(time.perf_counter() - started)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield took
    finally:
        over.set()
        thread.join()


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else default_model()
    flags = ("--max-model-len", "4096", "--chunk-cache-memory", "2GiB", "--enforce-eager")
    cores = shares(sorted(os.sched_getaffinity(0)), 2)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        registry = ("--registry", stack.enter_context(local_redis()))

        def start(name: str, role: str, of: list[int], *registry: str) -> ServerProcess:
            named = ("--replica-name", name, "--role", role) if registry else ()
            server = ServerProcess(folder / f"{name}.log", str(model), *flags, *registry, *named, environment=SECRET)
            os.sched_setaffinity(server.process.pid, of)
            stack.callback(server.stop)
            return server.wait_ready()

        prefill = start("prefill", "prefill", cores[1], *registry)
        decode = start("decode", "decode", cores[0], *registry)
        alone = start("alone", "both", cores[0])
        time.sleep(3)  # heartbeats
        decoding, prefilling, both = (Client(each.url, each.model) for each in (decode, prefill, alone))
        for client in (decoding, both):
            client.new_chunks()
        cases: dict[str, tuple[Client, Work]] = {
            "with roles": (decoding, decoding.new_chunks),
            "control: chunks for nobody": (decoding, prefilling.new_chunks),
            "without roles": (both, both.new_chunks),
        }
        ratios: dict[str, list[float]] = {name: [] for name in cases}
        for _ in range(ROUNDS):
            for name, (client, work) in cases.items():
                idle = client.per_token()
                with repeated(work) as took:
                    time.sleep(1)
                    ratios[name].append(client.per_token() / idle)
                print(
                    f"{name}: {ratios[name][-1]:.2f} (idle {idle * 1e3:.1f} ms; {CHUNKS} chunks in {took[0]:.1f} s)",
                    flush=True,
                )
        medians = {name: round(statistics.median(found), 3) for name, found in ratios.items()}
        print(json.dumps(medians))


if __name__ == "__main__":
    main()
