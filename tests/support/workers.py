# SPDX-License-Identifier: Apache-2.0
"""A worker's half of the connector without an engine, and segments for its pool."""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine_ext.core.worker import WorkerHalf
from kernels.layout import PagedTensor
from kernels.paged import LayerKV, make_pool
from kernels.reference import frequencies

HEADS, SIZE, LAYERS = 2, 4, 2
NAMES = [f"{layer}.{kind}" for layer in range(LAYERS) for kind in ("key", "value")]


def make_half(blocks: Sequence[Tensor], num_pages: int, page_tokens: int, fill: float = 0.0) -> WorkerHalf:
    """A worker with an engine's blocks, `[blocks, tokens, heads, size]` for each of :data:`NAMES`, and a pool."""
    half, views = WorkerHalf(0, page_tokens, blocks[0].shape[1]), list(map(PagedTensor.of, blocks))
    pools = [make_pool(each, num_pages, page_tokens).fill_(fill) for each in views]
    half.attach([LayerKV(*views[i : i + 2], *pools[i : i + 2], frequencies(SIZE)) for i in range(0, len(views), 2)])
    half.token_bytes = len(views) * HEADS * SIZE * 4
    return half


def segment(num_tokens: int, seed: int = 0) -> dict[str, Tensor]:
    """Random KV of a segment."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(num_tokens, HEADS, SIZE, generator=generator) for name in NAMES}


def is_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], each) for name, each in expected.items())
