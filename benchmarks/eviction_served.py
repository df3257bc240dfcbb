# SPDX-License-Identifier: Apache-2.0
"""Eviction policies compared through real servers: the traces of benchmarks/eviction.py, times measured.

One server per policy, on the same model with the same small pool, runs beside the others; each request of a trace goes
to every server in turn, so that noise of the machine meets all of them. Chunks have a quarter of the trace's lengths.
The time to first token is that of a request for one token, as its client sees it.
"""

import argparse
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, get_args

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.traces import TRACE_NAMES, Trace, TraceName, make_trace
from cache.eviction import EvictionPolicyName
from tools.random_model import build_preset
from tools.server_process import ServerProcess

SHORTER = 4
POOL_SHARE = 0.25
PAGE_TOKENS = 16
TOKEN_BYTES = 4096
"""Of tiny-llama's KV: 2 x 4 layers x 2 heads x 64 x 4 bytes."""
_FLAGS = ("--dtype", "float32", "--enforce-eager", "--kv-cache-memory-bytes", "256M")


class Texts:
    """The text of each chunk, for a byte-level model: one character is one token, and two line feeds are added."""

    def __init__(self, trace: Trace) -> None:
        rng = random.Random(trace.seed)
        lengths = (max(8, tokens // SHORTER) for tokens in trace.chunk_tokens)
        self.texts = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz ", k=n - 3)) + "x" for n in lengths]

    def pages(self, chunk: int) -> int:
        return -(-(len(self.texts[chunk]) + 2) // PAGE_TOKENS)


def measure(trace: Trace, policies: list[EvictionPolicyName]) -> Iterator[dict[str, Any]]:
    """A row per policy: share of chunks found, and mean seconds to the first token."""
    texts = Texts(trace)
    working_set = set(itertools.chain.from_iterable(trace.requests))
    pages = int(POOL_SHARE * sum(texts.pages(chunk) for chunk in working_set)) + 8  # and the system segment
    model = str(build_preset("tiny-llama"))
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        servers = {}
        for policy in policies:
            size = ("--chunk-cache-memory", str(pages * PAGE_TOKENS * TOKEN_BYTES))
            pool = (*size, "--chunk-cache-page-tokens", str(PAGE_TOKENS), "--chunk-cache-eviction", policy)
            server = ServerProcess(Path(folder) / f"{policy}.log", model, *_FLAGS, *pool)
            stack.callback(server.stop)
            servers[policy] = server.wait_ready()
        times: dict[str, list[float]] = {policy: [] for policy in policies}
        for request in track(trace.requests, trace.name, console=Console(stderr=True)):
            chunks = [texts.texts[chunk] for chunk in request]
            for policy, server in servers.items():
                times[policy].append(_first_token_s(server, chunks))
        for policy, server in servers.items():
            lookups = server.client.get("/v1/cache/stats").json()["counters"]["lookups"]
            share = lookups["hit"] / sum(lookups.values())
            yield {"trace": trace.name, "policy": policy, "hits": share, "ttft_s": statistics.mean(times[policy])}


def _first_token_s(server: ServerProcess, chunks: list[str]) -> float:
    body = {"system": "Answer.", "chunks": chunks, "question": "Which?", "max_tokens": 1, "cache": {"mode": "chunked"}}
    started = time.perf_counter()
    response = server.client.post("/v1/rag/chat", json=body)
    if response.status_code != 200:
        raise SystemExit(f"benchmark: {response.status_code}: {response.text}")
    return time.perf_counter() - started


def table(rows: list[dict[str, Any]]) -> Table:
    """A row per trace and policy."""
    shown = Table("trace", "policy", "chunks hit", "first token, mean", "against LRU")
    lru = {row["trace"]: row["ttft_s"] for row in rows if row["policy"] == "lru"}
    for row in rows:
        change = f"{100 * (row['ttft_s'] / lru[row['trace']] - 1):+.1f} %"
        shown.add_row(row["trace"], row["policy"], f"{row['hits']:.1%}", f"{row['ttft_s'] * 1e3:.1f} ms", change)
    return shown


def main() -> int:
    """Prints the table, and writes the rows as JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="*", metavar="TRACE", help=f"of {', '.join(TRACE_NAMES)} (default: all)")
    parser.add_argument("--requests", type=int, default=1000, help="of each trace (default: %(default)s)")
    parser.add_argument("--policies", nargs="+", default=["lru", "s3fifo"], choices=get_args(EvictionPolicyName))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="file for the rows")
    args = parser.parse_args()
    names: list[TraceName] = args.traces or list(TRACE_NAMES)
    if unknown := set(names) - set(TRACE_NAMES):
        parser.error(f"no trace is called {min(unknown)!r}")
    policies = list(dict.fromkeys(["lru", *args.policies]))
    rows = [row for name in names for row in measure(make_trace(name, args.seed, args.requests), policies)]
    Console(width=100).print(table(rows))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
