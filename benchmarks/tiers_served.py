# SPDX-License-Identifier: Apache-2.0
"""What tiers give and take on a real server: time to first token by where chunks come from; moving beside traffic.

    python -m benchmarks.tiers_served

A working set of ten times the pool. Each question has four chunks of 512 tokens: found in a tier, then, asked again, in
the pool; then four that are new. For the directory the page cache is dropped before every other question.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.progress import track

from benchmarks.statistics import median
from benchmarks.texts import Texts
from tools.progress import say
from tools.random_model import build_preset
from tools.server_process import ServerProcess

HOST_AT_MOST: Final = 1.5
DIRECTORY_AT_MOST: Final = 0.5
GROWTH_AT_MOST: Final = 1.1
CHUNKS: Final = 4
CHUNK_TOKENS: Final = 512
PAGE_TOKENS: Final = 32
TOKEN_BYTES: Final = 24_576
"""Of bench-100m's KV: 2 x 12 layers x 4 heads x 64 x 4 bytes."""
_POOL_QUESTIONS, _QUESTIONS = 2, 20
_FLAGS = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "8192", "--kv-cache-memory-bytes", "1G")
_ANSWER_TOKENS = 48


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints; 1 if a claim does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=["host", "file", "beside"], default=["host", "file", "beside"])
    parser.add_argument("--rounds", type=int, default=3, help="of moving beside traffic (default: %(default)s)")
    args = parser.parse_args(arguments)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="tessera-tiers-") as folder:
        for part in args.parts:
            results[part] = _beside(Path(folder), args.rounds) if part == "beside" else _hits(part, Path(folder))
    print(json.dumps(results))
    return int(not all(claim["holds"] for claims in results.values() for claim in claims))


def _hits(kind: str, folder: Path) -> list[dict[str, Any]]:
    """Claims about one tier."""
    texts, times = Texts(kind), defaultdict[str, list[float]](list)
    questions = [texts.chunks(CHUNKS, CHUNK_TOKENS) for _ in range(_QUESTIONS)]
    tier = "host://?size=4GiB" if kind == "host" else f"file://{folder}/kv?size=8GiB"
    with _server(folder / f"{kind}.log", _POOL_QUESTIONS, tier) as server:
        for chunks in track(questions, f"{kind}: filling", console=Console(stderr=True)):
            _ask(server, chunks, {"filled"})
            _wait_stored(server)
        for number, chunks in enumerate(track(questions, f"{kind}: asking", console=Console(stderr=True))):
            name = "tier"
            if kind == "file" and number % 2:
                name = "tier, page cache dropped"
                _drop_page_cache(folder / "kv")
            times[name].append(_ask(server, chunks, {"loaded"}))
            times["pool"].append(_ask(server, chunks, {"hit"}))
            times["computed"].append(_ask(server, texts.chunks(CHUNKS, CHUNK_TOKENS), {"filled"}))
            _wait_stored(server)
    for name, seconds in times.items():
        say(f"{kind}: {name}: median {median(seconds) * 1e3:.0f} ms of {len(seconds)}")
    against, most = ("pool", HOST_AT_MOST) if kind == "host" else ("computed", DIRECTORY_AT_MOST)
    return [
        _claim(f"{kind}: {name} / {against}", median(times[name]) / median(times[against]), most)
        for name in times
        if name.startswith("tier")
    ]


def _beside(folder: Path, rounds: int) -> list[dict[str, Any]]:
    """What bringing 1 GB from a directory to the pool costs an answer that is being written, against nothing."""
    texts, ratios = Texts("beside"), []
    questions = [texts.chunks(CHUNKS, CHUNK_TOKENS) for _ in range(_QUESTIONS)]
    everything = {"system": "Answer.", "chunks": [chunk for chunks in questions for chunk in chunks]}
    with _server(folder / "beside.log", _QUESTIONS + 1, f"file://{folder}/beside?size=8GiB") as server:
        for chunks in track(questions, "beside: filling", console=Console(stderr=True)):
            _ask(server, chunks, {"filled"})
        _wait_stored(server)
        _seconds_per_token(server)  # the first is slower
        for _ in range(rounds):
            server.client.post("/v1/cache/sleep", json={"idle_s": 0}).raise_for_status()
            with ThreadPoolExecutor(1) as thread:
                moving = thread.submit(server.client.post, "/v1/rag/chunks", json=everything)
                beside = []
                while not moving.done():
                    beside.append(_seconds_per_token(server))
            summary = json.loads(moving.result().text.splitlines()[-1])["summary"]
            alone = [_seconds_per_token(server) for _ in beside]
            kept = beside[:-1] or beside  # the last may have ended when nothing moved any more
            ratios.append(median(kept) / median(alone))
            gigabytes = summary["loaded"] * CHUNK_TOKENS * TOKEN_BYTES / 1e9
            say(
                f"beside: {gigabytes:.2f} GB moved in {summary['seconds']:.1f} s beside {len(kept)} answers; "
                f"{median(kept) * 1e3:.1f} ms per token, {median(alone) * 1e3:.1f} alone"
            )
    return [_claim("time per output token, while moving / alone", statistics.median(ratios), GROWTH_AT_MOST)]


@contextmanager
def _server(log: Path, pool_questions: int, tier: str) -> Iterator[ServerProcess]:
    pages = pool_questions * CHUNKS * CHUNK_TOKENS // PAGE_TOKENS + 8  # and the system segment
    pool = ("--chunk-cache-memory", str(pages * PAGE_TOKENS * TOKEN_BYTES), "--chunk-cache-tiers", tier)
    server = ServerProcess(log, str(build_preset("bench-100m")), *_FLAGS, *pool)
    try:
        yield server.wait_ready()
    finally:
        server.stop()


def _ask(server: ServerProcess, chunks: list[str], statuses: set[str]) -> float:
    """Seconds to the first token of an answer over chunks that have these statuses."""
    body = {"system": "Answer.", "chunks": chunks, "question": "Which?", "max_tokens": 1, "cache": {"mode": "chunked"}}
    started = time.perf_counter()
    response = server.client.post("/v1/rag/chat", json=body)
    seconds = time.perf_counter() - started
    if response.status_code != HTTPStatus.OK:
        raise SystemExit(f"benchmark: {response.status_code}: {response.text}")
    found = {chunk["status"] for chunk in response.json()["cache"]["chunks"]}
    if found != statuses:
        raise SystemExit(f"benchmark: chunks are {found}, not {statuses}: {response.json()['cache']}")
    return seconds


def _seconds_per_token(server: ServerProcess) -> float:
    body = {"messages": [{"role": "user", "content": "?"}], "max_tokens": _ANSWER_TOKENS, "ignore_eos": True}
    model = server.client.get("/v1/models").json()["data"][0]["id"]
    times = []
    request = {**body, "model": model, "stream": True, "temperature": 0}
    with server.client.stream("POST", "/v1/chat/completions", json=request) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                times.append(time.perf_counter())
    return (times[-1] - times[0]) / (len(times) - 1)


def _waiting(server: ServerProcess) -> int:
    waiting: int = server.client.get("/v1/cache/stats").json()["occupancy"]["archive_waiting"]
    return waiting


def _wait_stored(server: ServerProcess) -> None:
    while _waiting(server):
        time.sleep(0.02)


def _drop_page_cache(folder: Path) -> None:
    for path in folder.glob("??/*.safetensors"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _claim(name: str, value: float, at_most: float) -> dict[str, Any]:
    say(f"{name}: {value:.2f}, at most {at_most}: {'holds' if value <= at_most else 'does not hold'}")
    return {"name": name, "value": round(value, 3), "at_most": at_most, "holds": value <= at_most}


if __name__ == "__main__":
    sys.exit(main())
