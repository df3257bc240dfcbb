#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measure how new chunks slow running answers, with and without replicas that prefill.

    .venv/bin/python research/measure_roles.py [MODEL]

An answer is streamed while other requests bring 50 new chunks, again and again: by two replicas with roles, and by one
that does everything. The control, with roles: the replica that prefills computes chunks for nobody, which shows the
price of two busy processes on this machine. Prints the time per output token, relative to a quiet server's.
"""

import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

from app.commands.cluster import shares
from app.models.default_model import default_model
from machine.http_client import http_client
from machine.redis_process import local_redis
from machine.server_process import ServerProcess

ROUNDS, CHUNKS, REQUESTS, WORDS, TOKENS = 3, 50, 10, 60, 120
SECRET = {"TESSERA_PEER_SECRET": "of these replicas alone"}
Work = Callable[[], None]


def text(seed: str) -> str:
    words = random.Random(seed)
    return " ".join("".join(words.choices("aeioulnrst", k=5)) for _ in range(WORDS))


class Client:
    """Requests to one server."""

    def __init__(self, url: str, model: str) -> None:
        self._http = http_client(url, timeout=600)
        self._model = model
        self._numbers = itertools.count()

    def per_token(self, is_over: Callable[[], bool] = lambda: False) -> float:
        """The mean time between tokens of a streamed answer, in seconds, until ``is_over()``."""
        body = {"model": self._model, "prompt": "Once upon a time", "max_tokens": TOKENS, "ignore_eos": True}
        times = []
        with self._http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            for line in response.iter_lines():
                if line.startswith("data: {") and not is_over():
                    times.append(time.perf_counter())
        return (times[-1] - times[0]) / (len(times) - 1)

    def new_chunks(self) -> None:
        """Requests with new chunks, all at once."""

        def ask(number: int) -> None:
            chunks = [text(f"{self._http.base_url} {number} {i}") for i in range(CHUNKS // REQUESTS)]
            body = {"model": self._model, "chunks": chunks, "question": "What?", "max_tokens": 1}
            self._http.post("/v1/rag/chat", json=body).raise_for_status()

        with ThreadPoolExecutor(REQUESTS) as threads:
            list(threads.map(ask, itertools.islice(self._numbers, REQUESTS)))


@contextmanager
def meanwhile(work: Work) -> Iterator[Future[float]]:
    """Does ``work`` in a thread; yields its duration in seconds."""

    def run() -> float:
        started = time.perf_counter()
        work()
        return time.perf_counter() - started

    with ThreadPoolExecutor(1) as thread:
        yield thread.submit(run)


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
                with meanwhile(work) as took:
                    time.sleep(0.5)
                    ratios[name].append(client.per_token(took.done) / idle)
                times = f"idle {idle * 1e3:.1f} ms; {CHUNKS} chunks in {took.result():.1f} s"
                print(f"{name}: {ratios[name][-1]:.2f} ({times})", flush=True)
        medians = {name: round(statistics.median(found), 3) for name, found in ratios.items()}
        print(json.dumps(medians))


if __name__ == "__main__":
    main()
