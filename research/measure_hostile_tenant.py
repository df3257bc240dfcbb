#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measure what one tenant at its limits, on every endpoint, costs another tenant on the same server.

    .venv/bin/python research/measure_hostile_tenant.py                    # a random model
    .venv/bin/python research/measure_hostile_tenant.py --model MODEL --rounds 12

Rounds alternate between a quiet server and a hostile tenant. In each, the other tenant asks the same kind of questions,
half of them over new chunks, and deletes a chunk that it has just registered. Ratios are of medians of the same run.
"""

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final

import httpx

from app.access.tenants import hash_of, new_key
from app.models.default_model import DEFAULT_DTYPE
from app.models.random_model import build_preset
from machine.http_client import http_client
from machine.server_process import ServerProcess
from measuring.kit.texts import Texts

LIMITS: Final = """\
requests_per_minute = 600
tokens_per_minute = {tokens_per_minute}
concurrent_requests = 8
cache_memory = "64MiB"
cache_segments = 2000
collections_size = "64MiB"
"""
CHUNKS, TOKENS, QUESTIONS, THREADS = 6, 128, 8, 8
SLOW_S = 3.0
_FORK: Final = multiprocessing.get_context("fork")
FLAGS: Final = ("--max-model-len", "4096", "--chunk-cache-memory", "512MiB")


class Hostile:
    """Clients of a tenant that send, as fast as its limits let them, whatever costs a server most.

    In a process of its own, which gives way to all others: what costs the client is not measured.
    """

    def __init__(self, url: str, key: str) -> None:
        self.statuses: Counter[str] = Counter()
        self._url, self._headers = url, {"authorization": f"Bearer {key}"}
        self._lock, self._number, self._round = threading.Lock(), 0, 0
        self._texts = Texts("hostile")
        self._is_over, self._sent = _FORK.Event(), _FORK.SimpleQueue()

    def begin(self) -> None:
        """Start to send."""
        self._round += 1
        self._is_over.clear()
        self._process = _FORK.Process(target=self._run, daemon=True)
        self._process.start()

    def end(self) -> None:
        """Stop, and leave what is not answered."""
        self._is_over.set()
        self.statuses += self._sent.get()
        self._process.join()

    def _run(self) -> None:
        os.nice(19)
        self._texts, self._number, self.statuses = Texts(f"hostile {self._round}"), 7 * self._round, Counter()
        for number in range(THREADS):
            threading.Thread(target=self._send, args=(number,), daemon=True).start()
        self._is_over.wait()
        self._sent.put(self.statuses)

    def _send(self, offset: int) -> None:
        with http_client(self._url, headers=self._headers, timeout=300) as client:
            calls = list(self._calls(client))
            while True:
                with self._lock:
                    self._number += 1
                    name, call = calls[(self._number + offset) % len(calls)]
                try:
                    status = str(call().status_code)
                except httpx.HTTPError as error:
                    status = type(error).__name__
                self.statuses[f"{name} {status}"] += 1
                if status == "429":
                    time.sleep(0.05)

    def _text(self, tokens: int) -> str:
        with self._lock:
            return self._texts.text(tokens)

    def _calls(self, client: httpx.Client) -> Iterator[tuple[str, Callable[[], httpx.Response]]]:
        def post(path: str, body: Callable[[], Any]) -> tuple[str, Callable[[], httpx.Response]]:
            return path, lambda: client.post(path, json=body())

        def chunks(number: int, tokens: int = 60) -> list[str]:
            return [self._text(tokens) for _ in range(number)]

        asked = {"question": "Why?", "max_tokens": 64}
        many = [{"id": f"id{number}", "text": "one text"} for number in range(5000)]
        files = [("files", (f"{n}.html", b"<div><p>word " * 20_000)) for n in range(4)]
        yield post("/v1/rag/chat", lambda: {"chunks": chunks(20), **asked})
        yield post("/v1/rag/plan", lambda: {"chunks": chunks(1270, 12), **asked, "prefetch": True})
        yield post("/v1/rag/chunks", lambda: {"chunks": chunks(200)})
        yield post("/v1/rag/chunks", lambda: {"chunks": many})
        yield post("/v1/chat/completions", lambda: {"messages": [{"role": "user", "content": self._text(2000)}]})
        yield post("/v1/completions", lambda: {"prompt": "word " * 400_000})
        yield post("/tokenize", lambda: {"prompt": "word " * 200_000})
        yield post("/v1/rag/chat", lambda: {"chunks": ["x"] * 5000, **asked})
        yield "/v1/rag/collections", lambda: client.post(f"/v1/rag/collections/c{self._number % 5}", files=files)
        yield "/v1/rag/split", lambda: client.post("/v1/rag/split?filename=a.html", content=b"<b>" * 1_000_000)
        yield "DELETE", lambda: client.delete(f"/v1/rag/collections/c{self._number % 5}")
        yield "GET", lambda: client.get("/v1/rag/chunks", params={"limit": 1000})


class Victim:
    """The other tenant. Notes seconds by what was done, quiet or not, and statuses."""

    def __init__(self, url: str, key: str, texts: Texts) -> None:
        self.seconds: dict[tuple[str, bool], list[float]] = defaultdict(list)
        self.statuses: Counter[int] = Counter()
        self._texts = texts
        self._client = http_client(url, headers={"authorization": f"Bearer {key}"}, timeout=300)
        self._known = [texts.text(TOKENS) for _ in range(CHUNKS)]

    def ask(self, *, quiet: bool) -> None:
        """Ask questions over known and new chunks, and delete a chunk."""
        for number in range(QUESTIONS):
            kind = ("known chunks", "new chunks")[number % 2]
            chunks = [*self._known] if number % 2 == 0 else [self._texts.text(TOKENS) for _ in range(CHUNKS)]
            body = {"system": "Answer.", "chunks": chunks, "question": self._texts.text(12), "max_tokens": 8}
            self._timed(kind, quiet, "POST", "/v1/rag/chat", {**body, "temperature": 0, "ignore_eos": True})
        lines = self._client.post("/v1/rag/chunks", json={"chunks": [self._texts.text(TOKENS)]}).text.splitlines()
        self._timed("deletion", quiet, "DELETE", f"/v1/rag/chunks/{json.loads(lines[0])['key']}", None)

    def _timed(self, kind: str, quiet: bool, method: str, path: str, body: Any) -> None:
        began = time.perf_counter()
        response = self._client.request(method, path, json=body)
        seconds = time.perf_counter() - began
        self.seconds[kind, quiet].append(seconds)
        self.statuses[response.status_code] += 1
        if seconds > SLOW_S:
            print(
                f"{kind}: {seconds:.1f} s, by the server:",
                response.json().get("cache", {}).get("timings_ms"),
                flush=True,
            )


def report(victim: Victim, hostile: Hostile) -> None:
    """Print medians of each kind, and the ratios of medians and of means."""
    for kind in ("known chunks", "new chunks", "deletion"):
        quiet, beside = victim.seconds[kind, True], victim.seconds[kind, False]
        medians, means = [[1e3 * average(each) for each in (quiet, beside)] for average in (median, fmean)]
        print(
            f"{kind}: {medians[0]:.0f} ms alone, {medians[1]:.0f} ms beside it, ratio {medians[1] / medians[0]:.2f} "
            f"(means: {means[1] / means[0]:.2f}); longest {1e3 * max(quiet):.0f} and {1e3 * max(beside):.0f} ms"
        )
    print("the other tenant's statuses:", dict(victim.statuses))
    print("the hostile one's:", dict(sorted(hostile.statuses.items())))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", help="a folder or a packaged model; default: a random Llama")
    parser.add_argument("--preset", default="tiny-llama", help="of the random model")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--tokens-per-minute", type=int, default=6000, help="the hostile tenant's limit")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        keys = {name: new_key() for name in ("victim", "hostile")}
        sections = {"victim": "", "hostile": LIMITS.format(tokens_per_minute=args.tokens_per_minute)}
        tenants = Path(folder, "tenants.toml")
        tenants.write_text(
            "".join(
                f'[{name}]\nkeys = ["{hash_of(key)}"]\nroles = ["chat", "ingest"]\n{sections[name]}'
                for name, key in keys.items()
            )
        )
        model = args.model or str(build_preset(args.preset, Path(folder, "model")))
        dtype = ("--dtype", DEFAULT_DTYPE) if args.model else ()
        flags = (*dtype, "--collections", f"{folder}/collections", "--tenants", str(tenants))
        server = ServerProcess(Path(folder, "server.log"), model, *FLAGS, *flags).wait_ready()
        try:
            victim = Victim(server.url, keys["victim"], Texts("victim"))
            hostile = Hostile(server.url, keys["hostile"])
            victim.ask(quiet=True)
            victim.seconds.clear()
            for _ in range(args.rounds):
                victim.ask(quiet=True)
                hostile.begin()
                time.sleep(1)
                victim.ask(quiet=False)
                hostile.end()
                time.sleep(2)
            report(victim, hostile)
        finally:
            server.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
