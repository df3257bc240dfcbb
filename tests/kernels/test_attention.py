# SPDX-License-Identifier: Apache-2.0
"""Attention over segments in the pool, beside the reference, which rotates keys and takes one softmax."""

from collections import Counter
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels.attention import amx_attention, numba_attention
from kernels.attention.amx_attention import AmxAttention
from kernels.attention.numba_attention import NumbaAttention
from kernels.attention.numba_kernel import DIVIDED_ROWS
from kernels.attention.plan import BLOCKS, PLACE_BITS, POOL, AttendingRow, Tail, divide, plan_step, runs_of
from kernels.attention.reference import ReferenceAttention
from tests.kernels.attending import BLOCK, BLOCKS_EACH, PAGE, Model, fill, layer_of, requests, segment, steps
from tests.kernels.fakes import AMX

FAST = settings(derandomize=True, deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


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


@FAST
@given(model=MODELS, found=requests(), seed=st.integers(0, 5))
def test_every_token_attends_as_in_the_reference(model, found, seed):
    torch.manual_seed(seed)
    assert_as_in_the_reference(NumbaAttention, model, found)


def assert_as_in_the_reference(
    attention: type[NumbaAttention] | type[AmxAttention], model: Model, found: list[list[AttendingRow]]
) -> None:
    rows = [row for rows in found for row in rows]
    layer, plan = layer_of(model, 4 * BLOCKS_EACH), plan_step(rows)
    fill(layer, plan)
    assert attention.supports([layer])
    num_tokens = max(row.first + row.num_tokens for row in rows) + 1
    query = torch.randn(num_tokens, model.heads, model.dim).to(model.dtype)
    outputs = [torch.full_like(query, 7) for _ in range(2)]
    for each, output in zip((attention([layer]), ReferenceAttention([layer])), outputs, strict=True):
        each.attend(0, query, output, each.plan(found), model.dim**-0.5)
    torch.testing.assert_close(*outputs, rtol=TOLERANCE[model.dtype], atol=TOLERANCE[model.dtype])
    others = torch.ones(num_tokens, dtype=torch.bool).index_fill_(0, plan.tokens, False)
    assert bool((outputs[0][others] == 7).all())


@FAST
@given(model=MODELS, rows=steps(), seed=st.integers(0, 5), num_threads=st.sampled_from([2, 3, 7, 16]))
def test_threads_share_the_work(model, rows, seed, num_threads):
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


@FAST
@given(
    group=st.sampled_from([1, 4]),
    part=st.sampled_from([1, 2]),
    is_neox=st.booleans(),
    found=requests(),
    least=st.sampled_from([1, 30]),
    seed=st.integers(0, 5),
)
def test_long_prefills_attend_as_in_the_reference(group, part, is_neox, found, least, seed):
    """Beside shorter ones, in tiles of some of a row's tokens or of several rows."""
    torch.manual_seed(seed)
    model = Model(2 * group, 2, 64, 64 // part, is_neox, torch.bfloat16, AMX)
    with patch.multiple(amx_attention, PREFILL_TOKENS=least, TILE_TOKENS=40):
        assert_as_in_the_reference(AmxAttention, model, found)


def test_windows_over_a_long_context_attend_as_in_the_reference():
    """PyTorch takes 512 keys at a time, of which the first window sees the first ones only."""
    segments = [segment(range(24), 0, 384, delta) for delta in (0, 400, 900, 70_000)]
    windows = [Tail(runs_of((number,), BLOCK, 0, 30), 30) for number in range(2)]
    rows = [AttendingRow(0, 30, segments[:1], windows[0], 90), AttendingRow(30, 30, segments, windows[1], -50)]
    assert_as_in_the_reference(AmxAttention, Model(6, 2, 64, 64, True, torch.bfloat16, AMX), [rows])


def test_many_rows_are_not_divided_within_a_head(monkeypatch):
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


def test_a_segment_is_read_once_for_all_requests():
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


@FAST
@given(rows=steps(), keys=st.integers(1, 40), users=st.integers(1, 40), entries=st.integers(1, 40))
def test_units_have_what_each_token_sees_once(rows, keys, users, entries):
    plan = plan_step(rows)
    units = divide(plan, keys, users, entries)
    seen, read = Counter[tuple[int, ...]](), Counter[tuple[int, ...]]()
    for source, first_run, end_run, first_user, end_user in plan.pieces.tolist():
        runs = plan.runs[first_run:end_run].tolist()
        places = [(page << PLACE_BITS) + at + i for page, at, length in runs for i in range(length)]
        for index, turn, num_seen in plan.users[first_user:end_user].tolist():
            seen.update((int(plan.tokens[index]), turn, source, place) for place in places[:num_seen])
    for source, first, count, first_entry, num_entries in units.units.tolist():
        assert (count <= keys, num_entries <= users) == (True, True)
        for token, turn, num_seen in units.entries[first_entry : first_entry + num_entries].tolist():
            assert 1 <= num_seen <= count
            read.update((token, turn, source, place) for place in units.places[first : first + num_seen].tolist())
    assert read == seen
    for index, token in enumerate(plan.tokens.tolist()):
        own = units.order[units.bounds[index] : units.bounds[index + 1]]
        assert units.entries[own, 0].tolist() == [token] * len(own)
    assert units.slices[-1].tolist() == [len(units.units), len(units.entries), len(plan.tokens)]
    for (unit, entry, token), (end_unit, end_entry, end_token) in pairwise(units.slices.tolist()):
        assert units.units[unit:end_unit, 4].sum() == end_entry - entry
        assert set(units.entries[entry:end_entry, 0].tolist()) == set(plan.tokens[token:end_token].tolist())


@pytest.mark.parametrize(
    ("pages", "skipped", "length", "runs"),
    [
        ((7, 3), 0, 20, [(7, 0, 16), (3, 0, 4)]),
        ((7, 3), 15, 3, [(7, 15, 1), (3, 0, 2)]),
        ((7, 3), 16, 16, [(3, 0, 16)]),
        ((7,), 4, 0, []),
    ],
)
def test_runs_of_pages(pages, skipped, length, runs):
    assert list(runs_of(pages, PAGE, skipped, length)) == runs


@pytest.mark.parametrize("dim", [40, 24])
def test_heads_that_fill_no_vectors_are_not_supported(dim):
    assert not NumbaAttention.supports([layer_of(Model(2, 2, dim, dim, True, torch.float32), 1)])
    assert not NumbaAttention.supports([layer_of(Model(2, 2, 32, 32, True, torch.float16), 1)])
