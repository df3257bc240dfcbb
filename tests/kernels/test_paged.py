# SPDX-License-Identifier: Apache-2.0
"""Spans move between blocks and pool exactly, touching nothing else."""

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import compiled, paged
from kernels.paged import LayerKV, load_rows, load_rows_reference, make_pool, save_rows, save_rows_reference
from kernels.rope import RotaryFrequencies
from tests.kernels.fakes import LAYOUTS, Shape, make_cache

FAST = settings(derandomize=True, deadline=None, max_examples=20)
PAGE = 8
EMPTY = torch.empty(0, dtype=torch.int64)
TOKENS = st.sampled_from([0, 1, 15, 16, 63])
BLOCK_SIZES = st.sampled_from([1, 16, 64])
DTYPES = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])
LAYOUT_NAMES = st.sampled_from(list(LAYOUTS))


def frequencies(rotary_dim: int, theta: float = 10000.0, is_neox: bool = True) -> RotaryFrequencies:
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim
    return RotaryFrequencies(theta**-exponents, is_neox)


def make_layers(layout: str, shape: Shape, dtype: torch.dtype, pool_rows: int = 80) -> list[LayerKV]:
    """Three NaN-filled layers; the first two share their frequencies, the third differs."""
    shared, other = frequencies(shape.dim), frequencies(shape.dim // 2, 1e6, is_neox=False)
    layers = []
    for freqs in (shared, shared, other):
        cache = make_cache(layout, shape, dtype)
        pools = [make_pool(blocks, pool_rows // PAGE, PAGE).fill_(math.nan) for blocks in (cache.key, cache.value)]
        layers.append(LayerKV(cache.key, cache.value, *pools, freqs))
    return layers


def clone_layers(layers: list[LayerKV]) -> list[LayerKV]:
    return [
        LayerKV(
            layer.key_blocks.clone(),
            layer.value_blocks.clone(),
            layer.key_pool.clone(),
            layer.value_pool.clone(),
            layer.frequencies,
        )
        for layer in layers
    ]


@pytest.fixture(autouse=True)
def few_threads() -> Iterator[None]:
    """As on a small machine, where float32 goes through the compiled copies."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("layout", "dtype", "is_compiled"),
    [
        ("cpu", torch.float32, True),
        ("cpu", torch.bfloat16, False),
        ("2BNHD", torch.float32, False),
    ],
)
def test_the_cpu_layout_in_float32_is_compiled(layout: str, dtype: torch.dtype, is_compiled: bool) -> None:
    layers = make_layers(layout, Shape(3, 16, 2, 32), dtype)
    assert [layer.compiled is not None for layer in layers] == [is_compiled] * 3


def test_with_many_threads_torch_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "MOST_TORCH_THREADS", 0)
    assert make_layers("cpu", Shape(3, 16, 2, 32), torch.float32)[0].compiled is None


def shape_for(tokens: int, block_size: int, heads: int = 2, dim: int = 32) -> Shape:
    return Shape(blocks=tokens // block_size + 3, block_size=block_size, heads=heads, dim=dim)


def span(shape: Shape, tokens: int, start: int = 1) -> Tensor:
    """Slots of positions start.. in blocks handed out in a random order, leaving some untouched."""
    order = torch.randperm(shape.blocks, generator=torch.Generator().manual_seed(tokens))
    positions = torch.arange(start, start + tokens)
    return order[positions // shape.block_size] * shape.block_size + positions % shape.block_size


def fill_random(tensor: Tensor) -> None:
    tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(3)))


def assert_same(layers: list[LayerKV], expected: list[LayerKV], tolerance: float = 0.0) -> None:
    for layer, other in zip(layers, expected, strict=True):
        for name in ("key_blocks", "value_blocks", "key_pool", "value_pool"):
            allowed = tolerance if name == "key_blocks" else 0.0
            got, want = getattr(layer, name).double(), getattr(other, name).double()
            assert torch.allclose(got, want, rtol=allowed, atol=allowed, equal_nan=True), name


@FAST
@given(LAYOUT_NAMES, TOKENS, BLOCK_SIZES, DTYPES, st.booleans())
def test_save_matches_reference(layout, tokens, block_size, dtype, scattered) -> None:
    shape = shape_for(tokens, block_size)
    layers = make_layers(layout, shape, dtype)
    for layer in layers:
        fill_random(layer.key_blocks)
        fill_random(layer.value_blocks)
    expected = clone_layers(layers)
    rows = torch.randperm(80)[:tokens] if scattered else torch.arange(5, 5 + tokens)
    save_rows(layers, span(shape, tokens), rows)
    save_rows_reference(expected, span(shape, tokens), rows)
    assert_same(layers, expected)
    assert int(layers[2].value_pool[:, :, 0, 0].isfinite().sum()) == tokens


@FAST
@given(
    layout=LAYOUT_NAMES,
    tokens=TOKENS,
    block_size=BLOCK_SIZES,
    dtype=DTYPES,
    dim=st.sampled_from([32, 48]),
    heads=st.sampled_from([1, 2]),
    turns=st.sampled_from([[0], [131072], [-7, 5000], [0, 9, 0, -131072]]),
    scattered=st.booleans(),
)
def test_load_matches_reference(layout, tokens, block_size, dtype, dim, heads, turns, scattered) -> None:
    shape = shape_for(tokens, block_size, heads, dim)
    layers = make_layers(layout, shape, dtype)
    for layer in layers:
        fill_random(layer.key_pool)
        fill_random(layer.value_pool)
    expected = clone_layers(layers)
    rows = torch.randperm(80)[:tokens] if scattered else torch.arange(5, 5 + tokens)
    deltas = torch.tensor(turns)[torch.arange(tokens) % len(turns)]
    load_rows(layers, span(shape, tokens), rows, deltas)
    load_rows_reference(expected, span(shape, tokens), rows, deltas)
    assert_same(layers, expected, tolerance=max(2e-6, torch.finfo(dtype).eps))
    assert int(layers[2].key_blocks[:, :, 0, 0].isfinite().sum()) == tokens


@pytest.mark.parametrize("layout", LAYOUTS)
def test_saved_and_loaded_elsewhere_and_back(layout: str) -> None:
    shape = Shape(blocks=8, block_size=16, heads=2, dim=64)
    layers = make_layers(layout, shape, torch.float32, pool_rows=128)
    for layer in layers:
        fill_random(layer.key_blocks)
        fill_random(layer.value_blocks)
    before = clone_layers(layers)
    here, there = torch.arange(5, 45), torch.arange(70, 110)
    first, second = torch.arange(40), torch.arange(60, 100)
    save_rows(layers, here, first)
    load_rows(layers, there, first, torch.full((40,), 65536))
    save_rows(layers, there, second)
    load_rows(layers, here, second, torch.full((40,), -65536))
    for layer, old in zip(layers, before, strict=True):
        address = here // 16, here % 16
        assert torch.equal(layer.value_blocks[address], old.value_blocks[address])
        assert torch.allclose(layer.key_blocks[address], old.key_blocks[address], rtol=0, atol=3e-6)


@pytest.mark.parametrize("deltas", [[0, 0, 0], [5, 0, -5], [0, 0, 1]])
def test_delta_zero_is_a_copy_of_the_bits(deltas: list[int]) -> None:
    shape = Shape(blocks=2, block_size=4, heads=1, dim=32)
    layers = make_layers("cpu", shape, torch.float32)
    odd = torch.tensor([-0.0, math.inf, -math.inf, math.nan, 1e-45, -1.0, 3.4e38, 0.0]).repeat(3, 1, 4)
    for layer in layers:
        layer.key_pool[0, :3] = odd
        layer.value_pool[0, :3] = odd
    load_rows(layers, torch.tensor([1, 6, 3]), torch.arange(3), torch.tensor(deltas))
    for layer in layers:
        for token, slot in ((t, s) for t, s in enumerate((1, 6, 3)) if not deltas[t]):
            loaded = layer.key_blocks[slot // 4, slot % 4].contiguous()
            assert torch.equal(loaded.view(torch.int32), odd[token].view(torch.int32))


def test_nan_rows_poison_only_their_own_slots() -> None:
    shape = Shape(blocks=2, block_size=16, heads=2, dim=32)
    layers = make_layers("cpu", shape, torch.float32)
    layers[0].key_pool[0, :6] = 1
    layers[0].key_pool[0, 2] = math.nan
    load_rows(layers[:1], torch.arange(6), torch.arange(6), torch.full((6,), 3))
    assert layers[0].key_blocks[0, :6].isnan().any(-1).any(-1).tolist() == [False, False, True] + [False] * 3


def test_spans_longer_than_a_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged, "_TILE_TOKENS", 10)
    shape = shape_for(63, 16)
    layers = make_layers("cpu", shape, torch.float32)
    for layer in layers:
        fill_random(layer.key_pool)
        fill_random(layer.value_pool)
    expected = clone_layers(layers)
    rows, deltas = torch.arange(7, 70), torch.arange(63) // 25 * 100
    load_rows(layers, span(shape, 63), rows, deltas)
    load_rows_reference(expected, span(shape, 63), rows, deltas)
    assert_same(layers, expected, tolerance=2e-6)
    fill_random(layers[0].key_blocks)
    expected = clone_layers(layers)
    save_rows(layers, span(shape, 63), rows)
    save_rows_reference(expected, span(shape, 63), rows)
    assert_same(layers, expected)


def test_tables_are_computed_once_per_frequencies(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    angles = paged.rotation_angles

    def counted(freqs: RotaryFrequencies, deltas: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(len(deltas))
        return angles(freqs, deltas)

    monkeypatch.setattr(paged, "rotation_angles", counted)
    layers = make_layers("2BNHD", Shape(3, 16, 1, 32), torch.float32)
    load_rows(layers, torch.arange(20), torch.arange(20), torch.full((20,), 4))
    assert calls == [1, 1]


@pytest.mark.parametrize(
    ("slots", "rows", "error"),
    [
        ([0, 1], [0], ValueError),
        ([0], [0, 1], ValueError),
        ([-1, 0], [0, 1], IndexError),
        ([0, 48], [0, 1], IndexError),
        ([0, 1], [-1, 0], IndexError),
        ([0, 1], [79, 80], IndexError),
    ],
)
def test_bad_spans_are_refused_and_change_nothing(slots, rows, error) -> None:
    layers = make_layers("BNH2D", Shape(3, 16, 2, 32), torch.float32)
    before = clone_layers(layers)
    slots, rows = torch.tensor(slots), torch.tensor(rows)
    with pytest.raises(error):
        save_rows(layers, slots, rows)
    with pytest.raises(error):
        load_rows(layers, slots, rows, torch.zeros_like(slots))
    assert_same(layers, before)


def test_deltas_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\[1, 1, 0\]"):
        load_rows([], torch.tensor([0]), torch.tensor([0]), EMPTY)


def test_no_layers() -> None:
    save_rows([], torch.tensor([0]), torch.tensor([0]))
    load_rows([], torch.tensor([0]), torch.tensor([0]), torch.tensor([0]))
