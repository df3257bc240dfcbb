# SPDX-License-Identifier: Apache-2.0
"""The tests' emulation of AMX's layout is vLLM's own."""

import pytest
import torch
from torch import Tensor

from kernels.layout import probe_layout
from tests.kernels import amx

SHAPES = [(32, 32), (32, 64), (64, 96), (128, 64), (128, 128), (160, 256)]
"""Tokens of a block, size of a head."""


def make_caches(blocks: int, heads: int, block_size: int, head_size: int) -> tuple[Tensor, Tensor]:
    """Caches of K and V as vLLM views its one tensor."""
    cache = torch.full((blocks, heads, block_size, 2 * head_size), float("nan"), dtype=torch.bfloat16)
    key_cache, value_cache = cache.view(blocks, heads, 2 * block_size, head_size).chunk(2, dim=2)
    return key_cache, value_cache


def test_addresses_are_those_of_vllms_source() -> None:
    """K in int32 units: ``group * 16 * size / 2 + token % 16 + 16 * (dim / 2)``; V: sub-groups of two tokens."""
    assert amx.key_addresses(128, 64)[17, 5] == 2 * (1 * 16 * 32 + 1 + 16 * 2) + 1
    assert amx.value_addresses(128, 64)[17, 37] == 2 * (128 * 16) + 8 * 2 * 16 + 2 * 5 + 1


@pytest.mark.parametrize(("block_size", "head_size"), SHAPES)
@pytest.mark.parametrize("heads", [1, 3])
def test_what_is_written_is_read_as_probed(block_size: int, head_size: int, heads: int) -> None:
    caches = make_caches(4, heads, block_size, head_size)

    def write(key: Tensor, value: Tensor, slots: Tensor) -> None:
        amx.write(key, value, *caches, slots)

    probed = probe_layout(*caches, 4, block_size, heads, head_size, head_size, write)
    slots = torch.randperm(4 * block_size)[: 3 * block_size]
    key, value = torch.randn(2, len(slots), heads, head_size).bfloat16()
    write(key, value, slots)
    address = slots // block_size, slots % block_size
    assert torch.equal(probed.key_view(caches[0])[address], key)
    assert torch.equal(probed.value_view(caches[1])[address], value)
    for found, written in zip(amx.read(*caches, torch.arange(4)), (key, value), strict=True):
        assert torch.equal(found[slots], written)
