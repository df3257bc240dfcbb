# SPDX-License-Identifier: Apache-2.0
"""Chat traffic beside an ingest of 2,000 chunks: what the ingest costs running answers, per output token.

    python -m benchmarks.ingest

Clients ask for chat completions one after another, without a pause, before, during and after one call of
`POST /v1/rag/chunks`. Reported is the median time per output token of the requests that ran wholly beside the
ingest, over that of the requests that ran wholly without it.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.progress import Progress

from tools.random_model import build_preset
from tools.server_process import ServerProcess

AT_MOST = 1.5
"""Time per output token beside an ingest, over that without."""
_FLAGS = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "4096", "--chunk-cache-memory", "4GiB")


@dataclass(frozen=True)
class Served:
    """One chat completion: when it ran, and its seconds per output token after the first."""

    started: float
    ended: float
    per_token: float


class Traffic:
    """Clients that keep asking until told to stop."""

    def __init__(self, url: str, clients: int, tokens: int) -> None:
        self.served: list[Served] = []
        self._url = url
        self._tokens = tokens
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(i,)) for i in range(clients)]

    def __enter__(self) -> "Traffic":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def per_token(self, start: float, end: float) -> list[float]:
        """Of the requests that began and ended in `[start, end]`."""
        return [one.per_token for one in self.served if start <= one.started and one.ended <= end]

    def _ask(self, seed: int) -> None:
        rng = random.Random(seed)
        with httpx.Client(base_url=self._url, timeout=600) as client:
            while not self._stop.is_set():
                message = {"role": "user", "content": "".join(rng.choices("abcdefgh ", k=60))}
                self.served.append(_chat(client, {"messages": [message], "max_tokens": self._tokens}))


def _chat(client: httpx.Client, body: dict[str, Any]) -> Served:
    body = {**body, "stream": True, "temperature": 0, "ignore_eos": True}
    started, arrivals = time.perf_counter(), []
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if line.startswith("data: {") and json.loads(line[6:])["choices"][0]["delta"].get("content"):
                arrivals.append(time.perf_counter())
    if len(arrivals) < 2:
        raise SystemExit("benchmark: an answer had fewer than two tokens")
    return Served(started, arrivals[-1], (arrivals[-1] - arrivals[0]) / (len(arrivals) - 1))


def ingest(url: str, chunks: int, chunk_tokens: int, progress: Progress) -> dict[str, Any]:
    """One call with `chunks` chunks of a byte-level model; returns its summary."""
    rng = random.Random(1)
    texts = ["".join(rng.choices("abcdefghijklmnop", k=chunk_tokens - 2)) for _ in range(chunks)]
    task = progress.add_task("chunks", total=chunks)
    summary: dict[str, Any] = {}
    body = {"system": "Answer from the documents.", "chunks": texts}
    with httpx.stream("POST", f"{url}/v1/rag/chunks", json=body, timeout=None) as response:
        if response.status_code != 200:
            raise SystemExit(f"benchmark: {response.status_code}: {response.read().decode()}")
        for line in response.iter_lines():
            event = json.loads(line)
            summary = event.get("summary", summary)
            if "progress" in event:
                progress.update(task, completed=event["progress"]["done"])
    if summary.get("filled") != chunks:
        raise SystemExit(f"benchmark: not all of {chunks} chunks were filled: {summary}")
    return summary


def measure(server: ServerProcess, args: argparse.Namespace) -> dict[str, Any]:
    """Medians in seconds, and their ratio."""
    with Traffic(server.url, args.clients, args.tokens) as traffic, Progress(console=Console(stderr=True)) as progress:
        start = time.perf_counter()
        time.sleep(args.apart_s)
        begun = time.perf_counter()
        summary = ingest(server.url, args.chunks, args.chunk_tokens, progress)
        ended = time.perf_counter()
        time.sleep(args.apart_s)
        end = time.perf_counter()
    beside = traffic.per_token(begun, ended)
    apart = [*traffic.per_token(start, begun), *traffic.per_token(ended, end)]
    if min(len(beside), len(apart)) < 5:
        raise SystemExit(f"benchmark: {len(beside)} requests beside the ingest and {len(apart)} apart are too few")
    ratio = statistics.median(beside) / statistics.median(apart)
    return {
        "per_token_s": {"beside": statistics.median(beside), "apart": statistics.median(apart)},
        "requests": {"beside": len(beside), "apart": len(apart)},
        "ratio": ratio,
        "ingest": summary,
    }


def main() -> int:
    """Prints the ratio; exit code 1 if it is above the bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="model folder of a byte-level model (default: tiny-llama)")
    parser.add_argument("--chunks", type=int, default=2000, help="default: %(default)s")
    parser.add_argument("--chunk-tokens", type=int, default=64, help="default: %(default)s")
    parser.add_argument("--clients", type=int, default=2, help="chat clients (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=32, help="of each answer (default: %(default)s)")
    parser.add_argument("--apart-s", type=float, default=20, help="seconds before and after (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="file for the numbers")
    args, flags = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or str(build_preset("tiny-llama"))
        server = ServerProcess(Path(folder) / "server.log", model, *_FLAGS, *flags).wait_ready()
        try:
            result = measure(server, args)
        finally:
            server.stop()
    verdict = "ok" if result["ratio"] <= AT_MOST else "MISSED"
    for name, seconds in result["per_token_s"].items():
        print(f"time per output token {name:7} {seconds * 1e3:7.2f} ms, {result['requests'][name]} requests")
    print(f"ratio {result['ratio']:.2f}, at most {AT_MOST}: {verdict}; ingest: {result['ingest']}")
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if result["ratio"] <= AT_MOST else 1


if __name__ == "__main__":
    sys.exit(main())
