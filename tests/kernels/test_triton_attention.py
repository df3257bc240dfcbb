# SPDX-License-Identifier: Apache-2.0
"""Chunk attention by Triton, in its interpreter, beside the reference; what a step reads."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels.attention.plan import AttendingRow, Segment, Tail, plan_step, runs_of
from kernels.attention.reference import ReferenceAttention
from kernels.paged import LayerKV, make_pool
from kernels.reference import frequencies
from tests.kernels.attending import BLOCK, BLOCKS_EACH, Model, fill, layer_of, segment, steps
from tests.kernels.fakes import AMX, LAYOUTS, Shape, make_cache

PERFORMANCE = Path(__file__).parents[2] / "docs" / "performance.md"

TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 2e-2}
SLOW = settings(
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
MODELS = st.builds(
    lambda group, kv_heads, dim, part, is_neox, dtype, layout: Model(
        group * kv_heads, kv_heads, dim, dim // 2 // part * 2, is_neox, dtype, layout
    ),
    st.integers(1, 8),
    st.sampled_from([1, 2]),
    st.sampled_from([64, 80, 128, 192, 256]),
    st.sampled_from([1, 2]),
    st.booleans(),
    st.sampled_from(list(TOLERANCE)),
    st.sampled_from(list(LAYOUTS)),
)


def attention(layer: LayerKV) -> Any:
    from kernels.attention.triton_attention import TritonAttention

    assert TritonAttention.supports([layer])
    return TritonAttention([layer])


def assert_right(model: Model, rows: Sequence[AttendingRow]) -> None:
    layer, plan = layer_of(model, 16 * BLOCKS_EACH), plan_step(rows)
    fill(layer, plan)
    num_tokens = max(row.first + row.num_tokens for row in rows) + 1
    # As vLLM has them: a part of a longer tensor.
    query = torch.randn(num_tokens, model.heads + 2, model.dim).to(model.dtype)[:, : model.heads]
    outputs = [torch.full(query.shape, 7, dtype=model.dtype) for _ in range(2)]
    for each, output in zip((attention(layer), ReferenceAttention([layer])), outputs, strict=True):
        each.attend(0, query, output, plan, model.dim**-0.5)
    torch.testing.assert_close(*outputs, rtol=TOLERANCE[model.dtype], atol=TOLERANCE[model.dtype])
    others = torch.ones(num_tokens, dtype=torch.bool).index_fill_(0, plan.tokens, False)
    assert bool((outputs[0][others] == 7).all())


@pytest.mark.usefixtures("bfloat16_products")
@settings(SLOW, max_examples=10)
@given(model=MODELS, rows=steps(most_requests=3, most_tokens=4), seed=st.integers(0, 5))
def test_every_token_attends_as_in_the_reference(model: Model, rows: list[AttendingRow], seed: int) -> None:
    torch.manual_seed(seed)
    assert_right(model, rows)


@pytest.mark.matrix
@pytest.mark.usefixtures("bfloat16_products")
@settings(SLOW, max_examples=150)
@given(model=MODELS, rows=steps(most_requests=16), seed=st.integers(0, 5))
def test_many_requests(model: Model, rows: list[AttendingRow], seed: int) -> None:
    torch.manual_seed(seed)
    assert_right(model, rows)


@pytest.mark.parametrize("limits", [(16, 1, 1), (20, 3, 7), (512, 32, 20)])
def test_parts_of_long_pieces_and_many_rows(limits: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each key of a piece in a unit, tokens in slices."""
    from kernels.attention import triton_attention

    def divide(plan: Any, *_: int) -> Any:
        return real(plan, *limits)

    real = triton_attention.divide
    monkeypatch.setattr(triton_attention, "divide", divide)
    assert_right(Model(2, 1, 64, 64, True, torch.float32, "BHN2D"), shared_rows(3, 2))


def shared_rows(num_requests: int, num_tokens: int) -> list[AttendingRow]:
    """Requests that attend to the same three segments at different places."""
    known = [((1, 2), 3, 29), ((7, 4), 0, 32), ((9,), 5, 10)]
    rows = []
    for number in range(num_requests):
        segments = [segment(*each, 11 * number + 100 * i) for i, each in enumerate(known)]
        length = num_tokens + 20 + number
        tail = Tail(runs_of((2 * number, 2 * number + 1), BLOCK, 3, length), length)
        rows.append(AttendingRow(number * num_tokens, num_tokens, segments, tail))
    return rows


def test_what_is_not_supported() -> None:
    from kernels.attention.triton_attention import TritonAttention

    for model in (
        Model(2, 2, 320, 64, True, torch.float16, "BHN2D"),
        Model(2, 2, 64, 64, True, torch.float8_e4m3fn, "BHN2D"),
        Model(2, 2, 64, 64, True, torch.bfloat16, AMX),
    ):
        assert not TritonAttention.supports([layer_of(model, 1)])


class Reads:
    """Counts what the interpreter reads of some tensors, element by element."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from triton.runtime.interpreter import InterpreterBuilder

        load = InterpreterBuilder.create_masked_load

        def create_masked_load(builder: Any, pointers: Any, mask: Any, *others: Any) -> Any:
            self._note(pointers.data[mask.data])
            return load(builder, pointers, mask, *others)

        monkeypatch.setattr(InterpreterBuilder, "create_masked_load", create_masked_load)
        self._counted: list[tuple[torch.Tensor, np.ndarray]] = []

    def of(self, tensor: torch.Tensor) -> np.ndarray:
        """How often each element of the tensor's memory, contiguous or not, is read from now on."""
        size = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        counts = np.zeros(size, np.int64)
        self._counted.append((tensor, counts))
        return counts

    def _note(self, addresses: np.ndarray) -> None:
        for tensor, counts in self._counted:
            places = (addresses.ravel().astype(np.int64) - tensor.data_ptr()) // tensor.element_size()
            places = places[(places >= 0) & (places < len(counts))]
            np.add.at(counts, places, 1)


class Launches:
    """A kernel whose launches are counted, and with it the reads of what it merges."""

    def __init__(self, kernel: Any, reads: Reads) -> None:
        self._kernel = kernel
        self._reads = reads
        self.number = 0
        self.results: list[tuple[torch.Tensor, np.ndarray]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **constants: Any) -> None:
            self.number += 1
            self.results = [(each, self._reads.of(each)) for each in arguments[1:3]]
            self._kernel[grid](*arguments, **constants)

        return launch


def watched(monkeypatch: pytest.MonkeyPatch, reads: Reads) -> list[Launches]:
    """The two kernels of a layer, from now on."""
    from kernels.attention import triton_attention

    launches = []
    for name in ("attend_units", "merge_units"):
        launches.append(Launches(getattr(triton_attention, name), reads))
        monkeypatch.setattr(triton_attention, name, launches[-1])
    return launches


@pytest.mark.parametrize("group", [4, pytest.param(8, marks=pytest.mark.matrix)])
def test_a_shared_page_is_read_once_for_all_requests(group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = shared_rows(16, 1)
    plan = plan_step(rows)
    layer = layer_of(Model(2 * group, 2, 64, 64, True, torch.float16, "2BNHD"), 2 * len(rows))
    fill(layer, plan)
    query = torch.randn(16, 2 * group, 64).half()
    reads = Reads(monkeypatch)
    counts, launches = [reads.of(pool) for pool in (layer.key_pool, layer.value_pool)], watched(monkeypatch, reads)
    attention(layer).attend(0, query, torch.empty_like(query), plan, 0.1)
    for pool, count in zip((layer.key_pool, layer.value_pool), counts, strict=True):
        is_used = torch.zeros(pool.shape[:2], dtype=torch.int64)
        for each in rows[0].segments:
            for page, at, length in each.runs:
                is_used[page, at : at + length] = 1
        seen = torch.from_numpy(count).as_strided(pool.shape, pool.stride())
        assert torch.equal(seen, is_used[:, :, None, None].expand(pool.shape))
    assert [launch.number for launch in launches] == [1, 1]
    assert all(bool((count == 1).all()) for _, count in launches[1].results)


@pytest.mark.matrix
def test_a_step_of_llama_takes_what_the_documentation_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """One KV head of one layer of Llama 3.1 8B: 16 requests over 32 chunks of 512 tokens in orders of their own."""
    requests, chunks, length, group, size, layers, times = 16, 32, 512, 4, 128, 32, 8 * 32
    pages = [range(each * 32, each * 32 + 32) for each in range(chunks)]
    rows = [
        AttendingRow(
            number,
            1,
            [Segment(runs_of(pages[each], 16, 0, length), length, 512 * i) for i, each in enumerate(order)],
            Tail(runs_of((number,), 16, 0, 1), 1),
        )
        for number in range(requests)
        for order in [[(number + i) % chunks for i in range(chunks)]]
    ]
    cache = make_cache("B2NHD", Shape(requests, 16, 1, size), torch.float16, fill=0)
    pools = [make_pool(blocks, chunks * 32, 16).normal_() for blocks in cache.blocks]
    layer = LayerKV(*cache.blocks, *pools, frequencies(size))
    reads = Reads(monkeypatch)
    launches = watched(monkeypatch, reads)
    counts = [reads.of(pool) for pool in pools]
    query = torch.randn(requests, group, size).half()
    attention(layer).attend(0, query, torch.empty_like(query), plan_step(rows), size**-0.5)

    assert [launch.number for launch in launches] == [1, 1]
    assert all(bool((count == 1).all()) for count in counts)
    results = launches[1].results
    assert all(bool((count == 1).all()) for _, count in results)
    assert [len(each) for each, _ in results] == [requests * (chunks + 1)] * 2
    weights = 2 * (8_030_261_248 - 128_256 * 4096) / 1e9  # a step looks up few embeddings
    context = 2 * times * sum(count.sum() for count in counts) / 1e9
    partial = 2 * 4 * times * sum(each.numel() for each, _ in results) / 1e9
    for row in (
        f"| weights | {weights:.1f} GB | {weights:.1f} GB |",
        f"| context | {requests * context:.1f} GB | {context:.2f} GB |",
        f"| partial results, written and read | | {partial:.2f} GB |",
        f"| in all | {weights + requests * context:.1f} GB | {weights + context + partial:.1f} GB |",
        f"| launches for attention | {layers} | {2 * layers} |",
    ):
        assert row in PERFORMANCE.read_text()
