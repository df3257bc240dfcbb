# SPDX-License-Identifier: Apache-2.0
"""Layers and steps of requests that attend to segments in the pool."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from hypothesis import strategies as st

from kernels.attention.plan import BLOCKS, POOL, AttendingRow, AttentionPlan, Segment, Tail, runs_of
from kernels.paged import LayerKV, make_pool
from tests.kernels.fakes import Shape, make_cache
from tests.kernels.spans import frequencies

BLOCK, PAGE, BLOCKS_EACH, PAGES = 32, 16, 4, 24


class Model(NamedTuple):
    """Sizes of one layer."""

    heads: int
    kv_heads: int
    dim: int
    rotary_dim: int
    is_neox: bool
    dtype: torch.dtype
    layout: str = "cpu"


def layer_of(model: Model, num_blocks: int) -> LayerKV:
    """Pool and blocks full of NaN."""
    cache = make_cache(model.layout, Shape(num_blocks, BLOCK, model.kv_heads, model.dim), model.dtype)
    pools = [make_pool(blocks, PAGES, PAGE).fill_(float("nan")) for blocks in cache.blocks]
    return LayerKV(*cache.blocks, *pools, frequencies(model.rotary_dim, is_neox=model.is_neox))


def fill(layer: LayerKV, plan: AttentionPlan) -> None:
    """Random K and V where the plan reads."""
    for source, first, end, _, _ in plan.pieces.tolist():
        views = (layer.key_pool, layer.value_pool) if source == POOL else (layer.key_blocks, layer.value_blocks)
        for page, at, length in plan.runs[first:end].tolist():
            for view in views:
                view[page, torch.arange(at, at + length)] = torch.randn(length, *view.shape[2:]).to(view.dtype)


def segment(pages: Sequence[int], skipped: int, length: int, delta: int) -> Segment:
    return Segment(runs_of(pages, PAGE, skipped, length), length, delta)


def steps(most_requests: int = 4, most_tokens: int = 70) -> st.SearchStrategy[list[AttendingRow]]:
    """The rows of :func:`requests`."""
    return requests(most_requests, most_tokens).map(lambda found: [row for rows in found for row in rows])


@st.composite
def requests(draw, most_requests: int = 4, most_tokens: int = 70) -> list[list[AttendingRow]]:
    """The rows of requests with prefill or decode tokens over some of six segments; some have a window before."""
    known = []
    for number in range(6):
        pages = draw(st.permutations(range(number * 4, number * 4 + 4)))
        skipped = draw(st.integers(0, 2 * PAGE))
        length = draw(st.integers(1, 4 * PAGE - skipped))
        known.append((pages, skipped, length))
    found, first = [], draw(st.integers(0, 2))
    for number in range(draw(st.integers(1, most_requests))):
        chosen = draw(st.lists(st.integers(0, 5), max_size=5))
        segments = [segment(*known[each], draw(st.integers(-70, 5000))) for each in chosen]
        skipped = draw(st.integers(0, BLOCK - 1))
        length = draw(st.integers(1, BLOCKS_EACH * BLOCK - skipped))
        blocks = draw(st.permutations(range(number * BLOCKS_EACH, (number + 1) * BLOCKS_EACH)))
        window = draw(st.sampled_from([0, 0, length // 2]))
        spans = [(skipped, window), (skipped + window, length - window)]
        found.append(rows := [])
        for at, size in spans[not window :]:
            count, turn = draw(st.integers(1, min(size, most_tokens))), draw(st.sampled_from([0, 0, -40, 700]))
            rows.append(AttendingRow(first, count, segments, Tail(runs_of(blocks, BLOCK, at, size), size), turn))
            delta = draw(st.sampled_from([-turn, 33]))
            segments = [*segments, Segment(runs_of(blocks, BLOCK, at, size), size, delta, BLOCKS)]
            first += count + draw(st.integers(0, 2))
    return found
