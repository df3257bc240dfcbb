# SPDX-License-Identifier: Apache-2.0
"""Probing finds every affine layout and refuses everything else."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.layout import BlockLayout, CacheWriter, LayoutProbeError, probe_layout
from tests.kernels.fakes import AMX, LAYOUTS, MLA, FakeCache, Shape, make_cache

SHAPE = Shape(blocks=5, block_size=16, heads=2, dim=32)
SHAPES = st.builds(
    Shape,
    blocks=st.sampled_from([2, 3, 5]),
    block_size=st.sampled_from([1, 16, 64]),
    heads=st.sampled_from([1, 2, 3]),
    dim=st.sampled_from([1, 32, 80]),
)


def probe(cache: FakeCache, write: CacheWriter | None = None) -> BlockLayout:
    s, sizes = cache.shape, (cache.shape.dim, cache.shape.value_dim or cache.shape.dim)
    return probe_layout(cache.tensor, cache.tensor, s.blocks, s.block_size, s.heads, *sizes, write or cache.write)


def assert_spare_blocks_zero(cache: FakeCache) -> None:
    assert not cache.key[-2:].any()
    assert not cache.value[-2:].any()


@pytest.mark.parametrize("layout", [*LAYOUTS, MLA])
@settings(derandomize=True, deadline=None, max_examples=25)
@given(shape=SHAPES, dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
def test_views_are_the_engines_own(layout: str, shape: Shape, dtype: torch.dtype) -> None:
    if layout == MLA:
        shape = replace(shape, heads=1, value_dim=3 * shape.dim)
    cache = make_cache(layout, shape, dtype)
    found = probe(cache)
    assert cache.key[:-2].isnan().all()
    assert cache.value[:-2].isnan().all()
    assert_spare_blocks_zero(cache)
    for view, wanted in zip((found.key_view(cache.tensor), found.value_view(cache.tensor)), cache.blocks, strict=True):
        assert view.strided.shape == view.shape
        wanted.tiles.copy_(torch.randn(wanted.tiles.shape))
        assert torch.equal(view[:], wanted[:])


def test_key_and_value_may_lie_in_tensors_of_their_own() -> None:
    """As on Ascend; with latent attention their widths differ, too."""
    key_cache, value_cache = (torch.full((5, 16, 1, size), float("nan")) for size in (64, 512))

    def write(key: Tensor, value: Tensor, slots: Tensor) -> None:
        key_cache[slots // 16, slots % 16] = key
        value_cache[slots // 16, slots % 16] = value

    found = probe_layout(key_cache, value_cache, 5, 16, 1, 64, 512, write)
    for view, cache in ((found.key_view(key_cache), key_cache), (found.value_view(value_cache), value_cache)):
        assert (view.tiles.data_ptr(), view.shape) == (cache.data_ptr(), cache.shape)
        assert view.strided.is_contiguous()
    assert not key_cache[-2:].any()
    assert not value_cache[-2:].any()


def drop_last_token(cache: FakeCache, key: Tensor, value: Tensor, slots: Tensor) -> None:
    kept = slots != SHAPE.blocks * SHAPE.block_size - 1
    cache.write(key[kept], value[kept], slots[kept])


def share_one_place(cache: FakeCache, key: Tensor, value: Tensor, slots: Tensor) -> None:
    for token, slot in enumerate(slots.tolist()):
        block, offset = divmod(slot, SHAPE.block_size)
        cache.key[block, offset] = key[token] + value[token]


def quantise(cache: FakeCache, key: Tensor, value: Tensor, slots: Tensor) -> None:
    cache.write(key.round(), value.round(), slots)


def swizzle(cache: FakeCache, key: Tensor, value: Tensor, slots: Tensor) -> None:
    """The order of dimensions depends on the token."""
    dims = torch.arange(SHAPE.dim)
    keys = torch.stack([each[:, dims ^ (slot % 4)] for each, slot in zip(key, slots.tolist(), strict=True)])
    cache.write(keys, value, slots)


def reverse_blocks(cache: FakeCache, key: Tensor, value: Tensor, slots: Tensor) -> None:
    size = SHAPE.block_size
    cache.write(key, value, (2 * SHAPE.blocks - 3 - slots // size) * size + slots % size)


@pytest.mark.parametrize(
    ("writer", "words"),
    [
        *((writer, r"\d+ .*elements") for writer in (drop_last_token, share_one_place, quantise)),
        (swizzle, r"do not lie in tiles|is not what was written"),
        (reverse_blocks, "leave the cache"),
    ],
)
def test_wrong_writer_is_refused(writer, words) -> None:
    cache = make_cache("B2NHD", SHAPE)
    with pytest.raises(LayoutProbeError, match=words) as caught:
        probe(cache, lambda *operands: writer(cache, *operands))
    assert all((caught.value.cause, caught.value.seen, caught.value.advice))
    assert_spare_blocks_zero(cache)


def test_blocks_are_cleared_when_the_writer_raises() -> None:
    cache = make_cache("cpu", SHAPE)

    def write(key: Tensor, value: Tensor, slots: Tensor) -> None:
        cache.write(key + 1, value + 1, slots)
        raise OSError("writer failed")

    with pytest.raises(OSError, match="writer failed"):
        probe(cache, write)
    assert_spare_blocks_zero(cache)


def test_dimensions_in_tiles_are_found() -> None:
    """Groups of 8 dimensions, a whole block apart, as in vLLM's first layout."""
    cache = make_cache("B2NHD", SHAPE)
    tiles = cache.tensor[:, 0].view(SHAPE.blocks, SHAPE.heads, SHAPE.dim // 8, SHAPE.block_size, 8)

    def write(key: Tensor, value: Tensor, slots: Tensor) -> None:
        cache.write(torch.zeros_like(key), value, slots)
        for token, slot in enumerate(slots.tolist()):
            tile = key[token].view(SHAPE.heads, SHAPE.dim // 8, 8)
            tiles[slot // SHAPE.block_size, :, :, slot % SHAPE.block_size] = tile

    keys = probe(cache, write).key_view(cache.tensor)
    assert keys.strided is None
    key, value = torch.randn(2, 2, SHAPE.heads, SHAPE.dim)
    write(key, value, torch.tensor([3, 40]))
    assert torch.equal(keys[torch.tensor([0, 2]), torch.tensor([3, 8])], key)
    keys[1, 15] = key[0]
    assert torch.equal(tiles[1, :, :, 15].flatten(1), key[0])


def test_blocks_of_another_order_have_another_name() -> None:
    shape = Shape(3, 32, 2, 32)
    orders = {probe(make_cache(layout, shape, torch.bfloat16)).order for layout in ("cpu", AMX, "BNH2D")}
    assert len(orders) == 3
    larger = Shape(5, 32, 4, 32)
    assert {probe(make_cache(layout, larger, torch.bfloat16)).order for layout in ("cpu", AMX)} < orders


@pytest.mark.parametrize(("blocks", "said"), [(1, 1), (5, 7)])
def test_a_number_of_blocks_that_is_too_small_or_wrong_is_refused(blocks: int, said: int) -> None:
    cache = make_cache("cpu", Shape(blocks, 16, 2, 32))
    with pytest.raises(LayoutProbeError, match=f"num_blocks={said}"):
        probe_layout(cache.tensor, cache.tensor, said, 16, 2, 32, 32, cache.write)


@pytest.mark.parametrize(("block_size", "isa"), [(128, "vec"), (32, "vec"), (16, "vec16")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [1, 4])
def test_vllm_cpu_writer(block_size: int, isa: str, dtype: torch.dtype, heads: int) -> None:
    ops = pytest.importorskip("vllm._custom_ops")
    if not hasattr(torch.ops._C, "cpu_attn_reshape_and_cache"):
        pytest.skip("this vLLM has no CPU kernels")
    shape = Shape(6, block_size, heads, 64)
    cache = make_cache("cpu", shape, dtype)
    key_cache, value_cache = cache.tensor.view(6, heads, 2 * block_size, 64).chunk(2, dim=2)

    def write(key: Tensor, value: Tensor, slots: Tensor) -> None:
        ops.cpu_attn_reshape_and_cache(key, value, key_cache, value_cache, slots, isa, 1.0, 1.0, "auto")

    found = probe(cache, write)
    slots = torch.tensor([0, block_size + 3, 3 * block_size - 1])
    key, value = torch.randn(2, 3, heads, 64).to(dtype)
    write(key, value, slots)
    address = slots // block_size, slots % block_size
    assert torch.equal(found.key_view(cache.tensor)[address], key)
    assert torch.equal(found.value_view(cache.tensor)[address], value)
