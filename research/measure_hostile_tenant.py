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
from collections.abc import Iterator
from dataclasses import dataclass
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
NEW: Final = b"NEW000"
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
        self._lock, self._number = threading.Lock(), 0
        self._calls = tuple(costly_calls(Texts("hostile")))
        self._is_over, self._sent = _FORK.Event(), _FORK.SimpleQueue()

    def begin(self) -> None:
        """Start to send."""
        self._is_over.clear()
        self._process = _FORK.Process(target=self._run, daemon=True)
        self._process.start()

    def end(self) -> None:
        """Stop, and leave what is not answered."""
        self._is_over.set()
        statuses, self._number = self._sent.get()
        self.statuses += statuses
        self._process.join()

    def _run(self) -> None:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        self.statuses = Counter()
        for number in range(THREADS):
            threading.Thread(target=self._send, args=(number,), daemon=True).start()
        self._is_over.wait()
        self._sent.put((self.statuses, self._number))

    def _send(self, offset: int) -> None:
        with http_client(self._url, headers=self._headers, timeout=300) as client:
            while True:
                with self._lock:
                    self._number += 1
                    number = self._number
                call = self._calls[(number + offset) % len(self._calls)]
                try:
                    status = str(call.answer(client, number).status_code)
                except httpx.HTTPError as error:
                    status = type(error).__name__
                self.statuses[f"{call.method} {call.path} {status}"] += 1
                if status == "429":
                    time.sleep(0.05)


@dataclass(frozen=True)
class Call:
    """A request that is written once, so that sending it costs little: ``NEW`` in it becomes its number."""

    method: str
    path: str
    content: bytes = b""
    content_type: str = "application/json"

    def answer(self, client: httpx.Client, number: int) -> httpx.Response:
        """The server's answer to the request of this number."""
        content = self.content.replace(NEW, b"%06d" % number)
        return client.request(self.method, self.path, content=content, headers={"content-type": self.content_type})


def costly_calls(texts: Texts) -> Iterator[Call]:
    """Requests that cost a server most, on every endpoint that takes work."""

    def post(path: str, **body: Any) -> Call:
        return Call("POST", path, json.dumps(body).encode())

    def chunks(number: int, tokens: int = 60) -> list[str]:
        return [f"{NEW.decode()} {texts.text(tokens)}" for _ in range(number)]

    asked = {"question": "Why?", "max_tokens": 64}
    files = [("files", (f"{n}.html", b"<div><p>word " * 20_000)) for n in range(4)]
    form = httpx.Request("POST", "http://localhost", files=files)
    yield post("/v1/rag/chat", chunks=chunks(20), **asked)
    yield post("/v1/rag/plan", chunks=chunks(1270, 12), **asked, prefetch=True)
    yield post("/v1/rag/chunks", chunks=chunks(200))
    yield post("/v1/rag/chunks", chunks=[{"id": f"id{number}", "text": "one text"} for number in range(5000)])
    yield post("/v1/chat/completions", messages=[{"role": "user", "content": chunks(1, 2000)[0]}])
    yield post("/v1/completions", prompt="word " * 400_000)
    yield post("/tokenize", prompt="word " * 200_000)
    yield post("/v1/rag/chat", chunks=["x"] * 5000, **asked)
    yield Call("POST", "/v1/rag/collections/c", form.read(), form.headers["content-type"])
    yield Call("POST", "/v1/rag/split?filename=a.html", b"<b>" * 1_000_000, "text/html")
    yield Call("DELETE", "/v1/rag/collections/c")
    yield Call("GET", "/v1/rag/chunks?limit=1000")


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
