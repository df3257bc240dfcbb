# SPDX-License-Identifier: Apache-2.0
"""The parts of a warm request that are ours, alone in one process: planning it, and loading its chunks.

    python -m benchmarks.micro [plan] [load]

*plan*: an index of 100,000 chunks, requests of 100 of them: look up, and lease and release, on one core.
*load*: gather, rotate and scatter of 4160 tokens of the benchmark model (12 layers, 4 KV heads of 64, float32, the
CPU's block layout), as a ratio to a plain contiguous copy of the same bytes, measured in turn, on one thread.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cache.config import ChunkCacheConfig
from cache.hashing import CacheScope
from cache.layout import Chunk, ChunkedPrompt, PositionReindexer, PositionStrategy, pack
from cache.manager import ChunkCacheManager
from kernels.dispatch import copier_for
from kernels.paged import LayerKV, make_pool
from kernels.rope import RotaryFrequencies

INDEXED, REQUESTED, CHUNK_TOKENS, SYSTEM_TOKENS = 100_000, 100, 128, 64
PAGE_TOKENS = 32
LAYERS, HEADS, DIM, BLOCK = 12, 4, 64, 128
CHUNKS, LOADED_CHUNK, PREFIX = 8, 512, 64


def plan(rounds: int) -> dict[str, Any]:
    """Milliseconds of looking up, and of leasing and releasing, a request of 100 chunks."""
    rng = random.Random(0)
    pages = INDEXED * -(-CHUNK_TOKENS // PAGE_TOKENS) + SYSTEM_TOKENS
    manager = ChunkCacheManager(ChunkCacheConfig(pages, PAGE_TOKENS, "benchmark"))
    system = tuple(rng.choices(range(50_000), k=SYSTEM_TOKENS))
    texts = [tuple(rng.choices(range(50_000), k=CHUNK_TOKENS)) for _ in range(INDEXED)]
    for start in range(0, INDEXED, REQUESTED):
        lease = _acquire(manager, _prompt(system, texts[start : start + REQUESTED]))
        for job in lease.fills:
            manager.fill_succeeded(job)
        manager.release(lease)
    assert len(manager.index) == INDEXED + 1
    times: dict[str, list[float]] = {"look up": [], "lease and release": []}
    for _ in range(rounds):
        # As they come from the tokenizer: tokens that nobody has packed or hashed yet.
        first, second = (_prompt(system, _copies(rng.sample(texts, REQUESTED))) for _ in range(2))
        times["look up"].append(_milliseconds(partial(manager.look_up, first, CacheScope())))
        times["lease and release"].append(_milliseconds(partial(_lease_and_release, manager, second)))
    assert manager.metrics.lookups["hit"] == rounds * REQUESTED
    return {name: _quantiles(values) for name, values in times.items()}


def _lease_and_release(manager: ChunkCacheManager, prompt: ChunkedPrompt) -> None:
    manager.release(_acquire(manager, prompt))


def _prompt(system: tuple[int, ...], texts: list[tuple[int, ...]]) -> ChunkedPrompt:
    return ChunkedPrompt(system, tuple(map(Chunk, map(pack, texts))), (1,))


def _copies(texts: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    return [tuple(token + 0 for token in text) for text in texts]


def _acquire(manager: ChunkCacheManager, prompt: ChunkedPrompt) -> Any:
    return manager.acquire(prompt, PositionReindexer().layout(prompt, PositionStrategy.SHARED), CacheScope())


def load(rounds: int) -> dict[str, Any]:
    """Milliseconds of a plain copy, a load and a save of the same bytes, and the ratios."""
    torch.set_num_threads(1)
    tokens = PREFIX + CHUNKS * LOADED_CHUNK
    copier = copier_for(_layers(tokens))
    starts = [PAGE_TOKENS * 2 + LOADED_CHUNK * i for i in random.Random(0).sample(range(CHUNKS), CHUNKS)]
    rows = torch.cat([torch.arange(PREFIX), *(torch.arange(s, s + LOADED_CHUNK) for s in starts)])
    slots, deltas = torch.arange(BLOCK, BLOCK + tokens), torch.full((tokens,), (CHUNKS - 1) * LOADED_CHUNK)
    source = [torch.randn(tokens, HEADS, DIM) for _ in range(2 * LAYERS)]
    target = [torch.zeros(tokens, HEADS, DIM) for _ in source]
    kinds: dict[str, Callable[[], Any]] = {
        "plain copy": lambda: [b.copy_(a) for a, b in zip(source, target, strict=True)],
        "load": lambda: copier.load(slots, rows, deltas),
        "save": lambda: copier.save(slots, rows),
    }
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(rounds + 1):
        for name, work in kinds.items():
            times[name].append(_milliseconds(work))
    measured = {name: values[1:] for name, values in times.items()}  # the first round compiles
    ratios = {
        f"{name} / plain copy": statistics.median(map(_ratio, measured[name], measured["plain copy"]))
        for name in ("load", "save")
    }
    return {**{name: _quantiles(values) for name, values in measured.items()}, "ratios": ratios}


def _layers(tokens: int) -> list[LayerKV]:
    frequencies = RotaryFrequencies(10_000.0 ** (-torch.arange(0, DIM, 2, dtype=torch.float64) / DIM), is_neox=True)
    blocks = tokens // BLOCK + 2
    layers = []
    for _ in range(LAYERS):
        keys = torch.zeros(blocks, HEADS, DIM, BLOCK).permute(0, 3, 1, 2)
        values = torch.zeros(blocks, HEADS, BLOCK, DIM).permute(0, 2, 1, 3)
        pools = [make_pool(view, 2 * tokens // PAGE_TOKENS, PAGE_TOKENS).normal_() for view in (keys, values)]
        layers.append(LayerKV(keys, values, pools[0], pools[1], frequencies))
    return layers


def _milliseconds(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return (time.perf_counter() - started) * 1e3


def _ratio(a: float, b: float) -> float:
    return a / b


def _quantiles(values: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {"p50_ms": cuts[49], "p99_ms": cuts[98]}


def main() -> int:
    """Prints the numbers, and writes them as JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=["plan", "load", []], help="default: both")
    parser.add_argument("--rounds", type=int, default=200, help="measurements of each kind (default: 200)")
    parser.add_argument("--json", type=Path, help="file for the numbers")
    args = parser.parse_args()
    parts = {"plan": plan, "load": load}
    results = {name: parts[name](args.rounds) for name in args.parts or parts}
    for part, numbers in results.items():
        for name, values in numbers.items():
            print(f"{part:6} {name:20}", *(f"{key} {value:.3f}" for key, value in values.items()))
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
