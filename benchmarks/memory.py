# SPDX-License-Identifier: Apache-2.0
"""Memory of a server: what its chunk pool takes when it is full, and whether warm requests make it grow.

    python -m benchmarks.memory

The pool's memory is committed as pages are first written, so filling it must add what its pages hold. Memory is that of
all processes of the server, shared pages counted once (PSS, of Linux).
"""

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ByteSize, TypeAdapter
from rich.console import Console
from rich.progress import track

from benchmarks.loops import closed_loop
from benchmarks.pool import pool_of
from benchmarks.rag import BenchmarkError, Query
from benchmarks.systems import Server, running
from benchmarks.texts import Texts
from tools.progress import say
from tools.random_model import build_preset
from tools.server_process import group_members

POOL_AT_MOST, GROWTH_AT_MOST = 0.02, 0.03
"""How far the pool may be from what was configured, and how much the processes may grow, as shares."""
_CHUNKS, _CHUNK_TOKENS, _QUESTION_TOKENS = 5, 64, 16
_BATCH, _CLIENTS = 500, 4
_FILLING_CHUNK_TOKENS = 1024
_LONG_PROMPTS, _LONG_PROMPT_TOKENS = 12, 3500
"""They fill vLLM's own KV blocks, of 64 MB with 2 KiB a token, and take its longest steps."""
_FLAGS = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "4096", "--kv-cache-memory-bytes", "64M")
_NAMESPACE = "memory"


async def measure(server: Server, pool_bytes: int, requests: int) -> dict[str, Any]:
    """Bytes before and after the pool was filled, and after a tenth and all of the warm requests."""
    texts = Texts("memory")
    chunks = texts.chunks(4 * _CHUNKS, _CHUNK_TOKENS)
    await server.ingest(Query("Answer.", tuple(chunks), "", 1), _NAMESPACE)
    # Whatever is allocated once, is after this.
    for _ in range(_LONG_PROMPTS):
        await server.ask(Query("", (), texts.text(_LONG_PROMPT_TOKENS), 1))
    await _ask(server, texts, chunks, _BATCH)
    empty, pool = server_bytes(server), await pool_of(server)
    filling = texts.chunks(pool.free // pool.pages_for(_FILLING_CHUNK_TOKENS), _FILLING_CHUNK_TOKENS)
    await server.ingest(Query("Answer.", tuple(filling), "", 1), _NAMESPACE)
    added = pool.page_bytes * (pool.free - (await pool_of(server)).free)
    full = server_bytes(server)
    early = full
    for i in track(range(requests // _BATCH), "warm requests", console=Console(stderr=True)):
        await _ask(server, texts, chunks, _BATCH)
        if i == requests // _BATCH // 10:
            early = server_bytes(server)
    return {
        "pool": {"configured": pool_bytes, "allocated": pool.pages * pool.page_bytes},
        "filled": {"expected": added, "measured": full - empty},
        "processes": {"early": early, "late": server_bytes(server)},
        "requests": requests,
    }


async def _ask(server: Server, texts: Texts, chunks: list[str], number: int) -> None:
    queries = [
        Query("Answer.", tuple(texts.shuffled(chunks)[:_CHUNKS]), texts.text(_QUESTION_TOKENS), 1)
        for _ in range(number)
    ]
    outcome = await closed_loop(partial(server.ask, namespace=_NAMESPACE), queries, _CLIENTS)
    if any(chunk["status"] != "hit" for answer in outcome.answers for chunk in answer.report["chunks"]):
        raise BenchmarkError("a warm request did not find its chunks cached")


def server_bytes(server: Server) -> int:
    """Memory of all processes of the server's group."""
    return sum(map(_pss_bytes, group_members(server.process.process.pid)))


def _pss_bytes(pid: int) -> int:
    try:
        lines = Path("/proc", str(pid), "smaps_rollup").read_text().splitlines()
    except OSError:
        return 0  # it has ended
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)


def judged(result: dict[str, Any]) -> list[tuple[str, float, float]]:
    """By what share something is off, or has grown, and by how much it may."""
    pool, filled, processes = result["pool"], result["filled"], result["processes"]
    return [
        ("pool allocated, off the configured size", _off(pool["allocated"], pool["configured"]), POOL_AT_MOST),
        ("pool filled, off what its pages hold", _off(filled["measured"], filled["expected"]), POOL_AT_MOST),
        ("processes, growth", processes["late"] / processes["early"] - 1, GROWTH_AT_MOST),
    ]


def _off(value: float, expected: float) -> float:
    return abs(value / expected - 1)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the shares; exit code 1 if one is above its bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000, help="warm requests (default: %(default)s)")
    parser.add_argument("--pool", default="1GiB", help="memory of the chunk pool (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="file for the numbers")
    args = parser.parse_args(argv)
    try:
        result = asyncio.run(_run(TypeAdapter(ByteSize).validate_python(args.pool), args.requests))
    except BenchmarkError as error:
        say(str(error))
        return 1
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    missed = False
    for name, share, bound in judged(result):
        missed |= share > bound
        print(f"{name:42} {share:7.2%}, at most {bound:.0%}: {'MISSED' if share > bound else 'ok'}")
    return int(missed)


async def _run(pool_bytes: int, requests: int) -> dict[str, Any]:
    flags = (*_FLAGS, "--chunk-cache-memory", str(pool_bytes))
    with tempfile.TemporaryDirectory() as folder:
        async with running("tessera", str(build_preset("tiny-llama")), flags, Path(folder), is_stock=False) as server:
            return await measure(server, pool_bytes, requests)


if __name__ == "__main__":
    sys.exit(main())
