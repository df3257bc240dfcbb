# SPDX-License-Identifier: Apache-2.0
"""Loads of chunks into vLLM's CPU blocks, beside a plain copy of the same bytes: ``measure_loads.py [ROUNDS]``.

4,160 tokens in chunks of 64, 12 layers of 4 KV heads of 64, on one thread. Blocks are laid out as vLLM's own operator
writes them, which works on any CPU; each round times both in turn. Printed are the medians and the middle half of the
ratios, once without turning keys and once with.
"""

import sys
import time
from collections.abc import Callable
from statistics import median, quantiles
from typing import Final

import torch
from torch import Tensor

from kernels.dispatch import copier_for
from kernels.layout import probe_layout
from kernels.paged import LayerKV, make_pool
from kernels.reference import frequencies
from kernels.threads import use_one_thread

TOKENS, CHUNK_TOKENS, LAYERS, HEADS, HEAD_SIZE = 4160, 64, 12, 4, 64
CASES: Final = [
    (torch.float32, "vec", 32),
    (torch.float32, "vec", 128),
    (torch.bfloat16, "amx", 32),
    (torch.bfloat16, "amx", 128),
]
"""Dtype, the name that vLLM's operator has for the layout, and tokens in a block."""
PAGE_TOKENS: Final = 32


def layer(dtype: torch.dtype, isa: str, block_size: int) -> LayerKV:
    """A layer in the layout that vLLM's operator writes, with as many pages as tokens need."""
    from vllm import _custom_ops as ops

    blocks = -(-TOKENS // block_size) + 2
    cache = torch.zeros(blocks, HEADS, 2 * block_size, HEAD_SIZE, dtype=dtype)
    key_cache, value_cache = cache.chunk(2, dim=2)

    def write(key: Tensor, value: Tensor, slots: Tensor) -> None:
        ops.cpu_attn_reshape_and_cache(key, value, key_cache, value_cache, slots, isa)

    layout = probe_layout(key_cache, value_cache, blocks, block_size, HEADS, HEAD_SIZE, HEAD_SIZE, write)
    keys, values = layout.key_view(key_cache), layout.value_view(value_cache)
    num_pages = -(-TOKENS // PAGE_TOKENS)
    key_pool, value_pool = (make_pool(each, num_pages, PAGE_TOKENS).normal_() for each in (keys, values))
    return LayerKV(keys, values, key_pool, value_pool, frequencies(HEAD_SIZE, 1e4, is_neox=True))


def seconds(call: Callable[..., object], *arguments: Tensor) -> float:
    started = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - started


def main() -> None:
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    use_one_thread()
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    for dtype, isa, block_size in CASES:
        copier = copier_for([layer(dtype, isa, block_size) for _ in range(LAYERS)])
        source = torch.zeros(2 * LAYERS * TOKENS * HEADS * HEAD_SIZE, dtype=dtype)
        target = torch.zeros_like(source)
        slots = rows = torch.arange(TOKENS)
        for name, turn in (("as they are", 0), ("turned", CHUNK_TOKENS)):
            deltas = (slots // CHUNK_TOKENS + 1) * turn
            times = [
                (seconds(target.copy_, source), seconds(copier.load, slots, rows, deltas)) for _ in range(rounds + 5)
            ][5:]
            low, middle, high = quantiles([load / copy for copy, load in times], n=4)
            copy_ms, load_ms = (1e3 * median(column) for column in zip(*times, strict=True))
            print(
                f"{dtype} ({isa}), blocks of {block_size}, keys {name}: a plain copy {copy_ms:.1f} ms, "
                f"a load {load_ms:.1f} ms: {middle:.2f} times ({low:.2f} to {high:.2f})",
                flush=True,
            )


if __name__ == "__main__":
    main()
