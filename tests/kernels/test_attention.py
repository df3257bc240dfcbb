# SPDX-License-Identifier: Apache-2.0
"""Attention over segments in the pool, beside the reference, which rotates keys and takes one softmax."""

from collections.abc import Sequence
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels.attention import numba_attention
from kernels.attention.numba_attention import NumbaAttention
from kernels.attention.numba_kernel import DIVIDED_ROWS
from kernels.attention.plan import (
    BLOCKS,
    POOL,
    AttendingRow,
    AttentionPlan,
    Segment,
    Tail,
    plan_step,
    runs_of,
)
from kernels.attention.reference import ReferenceAttention
from kernels.paged import LayerKV, make_pool
from tests.kernels.fakes import AMX, Shape, make_cache
from tests.kernels.spans import frequencies

FAST = settings(derandomize=True, deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
BLOCK, PAGE, BLOCKS_EACH, PAGES = 32, 16, 4, 24
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


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


MODELS = st.builds(
    lambda group, kv_heads, dim, part, is_neox, kind: Model(
        group * kv_heads, kv_heads, dim if kind[1] != AMX else dim // 32 * 32, dim // 32 * 32 // part, is_neox, *kind
    ),
    st.sampled_from([1, 3, 4]),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([32, 48, 64]),
    st.sampled_from([1, 2]),
    st.booleans(),
    st.sampled_from([(torch.float32, "cpu"), (torch.bfloat16, "cpu"), (torch.bfloat16, AMX)]),
)


@st.composite
def steps(draw) -> list[AttendingRow]:
    """Requests with prefill or decode tokens over some of six segments."""
    known = []
    for number in range(6):
        pages = draw(st.permutations(range(number * 4, number * 4 + 4)))
        skipped = draw(st.integers(0, 2 * PAGE))
        length = draw(st.integers(1, 4 * PAGE - skipped))
        known.append((pages, skipped, length))
    rows, first = [], draw(st.integers(0, 2))
    for number in range(draw(st.integers(1, 4))):
        chosen = draw(st.lists(st.integers(0, 5), max_size=5))
        segments = [segment(*known[each], draw(st.integers(-70, 5000))) for each in chosen]
        skipped = draw(st.integers(0, BLOCK - 1))
        length = draw(st.integers(1, BLOCKS_EACH * BLOCK - skipped))
        blocks = draw(st.permutations(range(number * BLOCKS_EACH, (number + 1) * BLOCKS_EACH)))
        count = draw(st.integers(1, min(length, 70)))
        tail = Tail(runs_of(blocks, BLOCK, skipped, length), length)
        rows.append(AttendingRow(first, count, segments, tail))
        first += count + draw(st.integers(0, 2))
    return rows


@FAST
@given(model=MODELS, rows=steps(), seed=st.integers(0, 5))
def test_every_token_attends_as_in_the_reference(model: Model, rows: list[AttendingRow], seed: int) -> None:
    torch.manual_seed(seed)
    layer, plan = layer_of(model, 4 * BLOCKS_EACH), plan_step(rows)
    fill(layer, plan)
    assert NumbaAttention.supports([layer])
    num_tokens = max(row.first + row.num_tokens for row in rows) + 1
    query = torch.randn(num_tokens, model.heads, model.dim).to(model.dtype)
    outputs = [torch.full_like(query, 7) for _ in range(2)]
    for attention, output in zip((NumbaAttention, ReferenceAttention), outputs, strict=True):
        attention([layer]).attend(0, query, output, plan, model.dim**-0.5)
    torch.testing.assert_close(*outputs, rtol=TOLERANCE[model.dtype], atol=TOLERANCE[model.dtype])
    others = torch.ones(num_tokens, dtype=torch.bool).index_fill_(0, plan.tokens, False)
    assert bool((outputs[0][others] == 7).all())


@FAST
@given(model=MODELS, rows=steps(), seed=st.integers(0, 5), num_threads=st.sampled_from([2, 3, 7, 16]))
def test_threads_share_the_work(model: Model, rows: list[AttendingRow], seed: int, num_threads: int) -> None:
    """With more threads than KV heads, and with numbers that don't divide each other, threads share heads."""
    torch.manual_seed(seed)
    layer, plan = layer_of(model, 4 * BLOCKS_EACH), plan_step(rows)
    fill(layer, plan)
    query = torch.randn(max(row.first + row.num_tokens for row in rows), model.heads, model.dim).to(model.dtype)
    outputs = []
    for count in (1, num_threads):
        with patch.object(torch, "get_num_threads", lambda count=count: count):
            outputs.append(torch.zeros_like(query))
            NumbaAttention([layer]).attend(0, query, outputs[-1], plan, 0.2)
    torch.testing.assert_close(*outputs, rtol=TOLERANCE[model.dtype], atol=TOLERANCE[model.dtype])


def test_many_rows_are_not_divided_within_a_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(numba_attention, "merge", lambda out, parts, *_: assert_unused(parts[0]))
    model = Model(32, 2, 32, 32, True, torch.float32)
    num_tokens = DIVIDED_ROWS // 16 + 1
    row = AttendingRow(0, num_tokens, [segment((1, 2), 0, 20, 9)], Tail(runs_of(range(6), BLOCK, 3, 150), 150))
    layer, plan = layer_of(model, 6), plan_step([row])
    fill(layer, plan)
    query, outputs = torch.randn(num_tokens, 32, 32), [torch.zeros(num_tokens, 32, 32) for _ in range(2)]
    for attention, output in zip((NumbaAttention, ReferenceAttention), outputs, strict=True):
        attention([layer]).attend(0, query, output, plan, 0.2)
    torch.testing.assert_close(*outputs, rtol=2e-6, atol=2e-6)


def assert_unused(slots: Any) -> None:
    assert (slots == -1).all()


def test_a_segment_is_read_once_for_all_requests() -> None:
    shared, other = segment((1, 2), 0, 20, 9), segment((1, 2), 0, 20, 4)
    tails = [Tail(runs_of((block,), BLOCK, 0, 5), 5) for block in range(3)]
    rows = [
        AttendingRow(index, 1, [each], tail)
        for index, (each, tail) in enumerate(zip([shared, shared, other], tails, strict=True))
    ]
    plan = plan_step(rows)
    assert [source for source, *_ in plan.pieces.tolist()] == [POOL, BLOCKS, BLOCKS, BLOCKS]
    assert plan.users[:3].tolist() == [[0, 1, 20], [1, 1, 20], [2, 2, 20]]
    assert plan.deltas.tolist() == [0, 9, 4]


@pytest.mark.parametrize(
    ("pages", "skipped", "length", "runs"),
    [
        ((7, 3), 0, 20, [(7, 0, 16), (3, 0, 4)]),
        ((7, 3), 15, 3, [(7, 15, 1), (3, 0, 2)]),
        ((7, 3), 16, 16, [(3, 0, 16)]),
        ((7,), 4, 0, []),
    ],
)
def test_runs_of_pages(pages, skipped, length, runs) -> None:
    assert list(runs_of(pages, PAGE, skipped, length)) == runs


@pytest.mark.parametrize("dim", [40, 24])
def test_heads_that_fill_no_vectors_are_not_supported(dim: int) -> None:
    assert not NumbaAttention.supports([layer_of(Model(2, 2, dim, dim, True, torch.float32), 1)])
    assert not NumbaAttention.supports([layer_of(Model(2, 2, 32, 32, True, torch.float16), 1)])
