# SPDX-License-Identifier: Apache-2.0
"""Eviction policies compared: traces of requests are replayed against each, with pools of several sizes.

Hits are counted; nothing is computed, so the time to first token is modelled: a fixed part, and the cost of the tokens
that are missing. The pool is empty at first. Ranges are those of the seeds.
"""

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_args

from rich.console import Console
from rich.table import Table

from benchmarks.traces import TRACE_NAMES, Trace, TraceFileError, make_trace, read_trace
from cache.eviction import EvictionPolicy, EvictionPolicyName, make_policy, prefill_cost

POLICIES: tuple[EvictionPolicyName, ...] = get_args(EvictionPolicyName)
POOL_SHARES = (0.1, 0.25, 0.5)
PAGE_TOKENS = 16
SYSTEM_TOKENS = 64
"""Before each chunk; the system segment's own pages are beside the pool, it is never evicted."""

FIXED_MS = 163.0
MS_PER_TOKEN = 1.33
"""As `make bench` measured on two cores: all chunks cached; and 5814 ms, 8 x 512 tokens behind 64 missing."""


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """A chunk as policies see it."""

    key: int
    tokens: int

    @property
    def num_pages(self) -> int:
        return -(-self.tokens // PAGE_TOKENS)

    @property
    def recompute_cost(self) -> float:
        return prefill_cost(SYSTEM_TOKENS, self.tokens)


@dataclass(frozen=True, slots=True)
class Result:
    """One replay: shares of chunks and of tokens found, and the mean modelled time to first token."""

    trace: str
    seed: int
    pool_share: float
    policy: EvictionPolicyName
    chunk_hits: float
    token_hits: float
    ttft_ms: float


class Pool:
    """Counts pages as :class:`cache.manager.ChunkCacheManager` does, for one request at a time."""

    def __init__(self, pages: int, policy: EvictionPolicy[Chunk]) -> None:
        self._free = pages
        self._policy = policy
        self._held: set[Chunk] = set()

    def request(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """Holds all ``chunks`` and returns those that were missing. If they don't fit, all are, and nothing changes."""
        missing = [chunk for chunk in chunks if chunk not in self._held]
        if not self._make_room(sum(chunk.num_pages for chunk in missing), chunks):
            return list(chunks)
        for chunk in chunks:
            if chunk in self._held:
                self._policy.used(chunk)
            else:
                self._policy.added(chunk)
                self._held.add(chunk)
                self._free -= chunk.num_pages
        return missing

    def _make_room(self, needed: int, spared: Sequence[Chunk]) -> bool:
        victims, freed = [], self._free
        if freed < needed:
            for chunk in self._policy.victims():
                if chunk not in spared:
                    victims.append(chunk)
                    freed += chunk.num_pages
                if freed >= needed:
                    break
            else:
                return False
        for chunk in victims:
            self._policy.evicted(chunk)
            self._held.remove(chunk)
        self._free = freed
        return True


def replay(trace: Trace, policy: EvictionPolicyName, pool_share: float) -> Result:
    """The trace against a pool that holds ``pool_share`` of all chunks that it ever requests."""
    chunks = [Chunk(number, tokens) for number, tokens in enumerate(trace.chunk_tokens)]
    working_set = set(itertools.chain.from_iterable(trace.requests))
    pool = Pool(int(pool_share * sum(chunks[number].num_pages for number in working_set)), make_policy(policy))
    requests = [[chunks[number] for number in request] for request in trace.requests]
    wanted = list(itertools.chain.from_iterable(requests))
    missing = list(itertools.chain.from_iterable(map(pool.request, requests)))
    return Result(
        trace=trace.name,
        seed=trace.seed,
        pool_share=pool_share,
        policy=policy,
        chunk_hits=1 - len(missing) / len(wanted),
        token_hits=1 - _tokens(missing) / _tokens(wanted),
        ttft_ms=FIXED_MS + MS_PER_TOKEN * sum(chunk.recompute_cost for chunk in missing) / len(trace.requests),
    )


def _tokens(chunks: Iterable[Chunk]) -> int:
    return sum(chunk.tokens for chunk in chunks)


def table(results: Sequence[Result]) -> Table:
    """A row for each trace, pool and policy: means over the seeds; the change against LRU also with its range."""
    shown = Table(title="Time to first token is modelled", title_justify="left")
    for column in ("trace", "pool", "policy"):
        shown.add_column(column)
    for column in ("chunks hit, %", "tokens hit, %", "first token, ms", "against LRU, %"):
        shown.add_column(column, justify="right")
    for (trace, share), group in itertools.groupby(results, lambda result: (result.trace, result.pool_share)):
        by_policy: dict[EvictionPolicyName, list[Result]] = {policy: [] for policy in POLICIES}
        for result in group:
            by_policy[result.policy].append(result)
        for policy, runs in by_policy.items():
            changes = [100 * (run.ttft_ms / lru.ttft_ms - 1) for run, lru in zip(runs, by_policy["lru"], strict=True)]
            shown.add_row(
                trace,
                f"{share:.0%}",
                policy,
                f"{100 * statistics.mean(run.chunk_hits for run in runs):.1f}",
                f"{100 * statistics.mean(run.token_hits for run in runs):.1f}",
                f"{statistics.mean(run.ttft_ms for run in runs):.0f}",
                ""
                if policy == "lru"
                else f"{statistics.mean(changes):+.1f} ({min(changes):+.1f} to {max(changes):+.1f})",
                end_section=policy == POLICIES[-1],
            )
    return shown


def main() -> int:
    """Runs the benchmark; a table is printed, and every replay written as JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000, help="requests of each trace (default: 10000)")
    parser.add_argument("--seed", type=int, default=0, help="the first seed (default: 0)")
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds (default: 5)")
    parser.add_argument("--trace", type=Path, help="replay this file (benchmarks/traces.py) instead")
    parser.add_argument("--json", type=Path, help="file for the results")
    args = parser.parse_args()
    if min(args.requests, args.seeds) < 1:
        parser.error("--requests and --seeds must be at least 1")
    try:
        results = list(_results(args))
    except TraceFileError as error:
        parser.error(str(error))
    console = Console()
    if not console.is_terminal:
        console.width = 110
    console.print(table(results))
    if args.json:
        args.json.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n", encoding="utf-8")
    return 0


def _results(args: argparse.Namespace) -> Iterable[Result]:
    seeds = range(args.seed, args.seed + args.seeds)
    made = ([make_trace(name, seed, args.requests) for seed in seeds] for name in TRACE_NAMES)
    for traces in [[read_trace(args.trace)]] if args.trace else made:
        for share, policy, trace in itertools.product(POOL_SHARES, POLICIES, traces):
            yield replay(trace, policy, share)


if __name__ == "__main__":
    sys.exit(main())
