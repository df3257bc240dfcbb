# SPDX-License-Identifier: Apache-2.0
"""Differences between KV in pages: rounding passes, one wrong dimension of one head does not."""

import pytest
import torch
from torch import Tensor

from engine_ext.core.pages import largest_difference
from engine_ext.start.self_check import QUANTIZED_TOLERANCE, TOLERANCE
from kernels.reference import frequencies
from kernels.rope import rotate_keys, rotation_angles

TOKENS, HEADS, SIZE, PAGE_TOKENS = 77, 8, 128, 16
OUTLIERS = (3, 40, 127)
"""Dimensions of K that are a hundred times the others, as in Qwen2.5."""
SMALL = 6
"""A head of small values."""
FP8 = torch.float8_e4m3fn
DTYPES = [*TOLERANCE, FP8]
PAGES_A, PAGES_B = [0, 2, 4, 6, 8], [1, 3, 5, 7, 9]


def tolerance(dtype: torch.dtype) -> float:
    return TOLERANCE.get(dtype, QUANTIZED_TOLERANCE)


def keys(seed: int = 0) -> Tensor:
    """K as it is before its rotation, float32 `[tokens, heads, size]`."""
    found = torch.randn(TOKENS, HEADS, SIZE, generator=torch.Generator().manual_seed(seed))
    found[..., list(OUTLIERS)] += 100
    found[:, SMALL] /= 20
    return found


def turned(key: Tensor, by: Tensor) -> Tensor:
    """Each token's key turned by its number of positions."""
    return rotate_keys(key, *rotation_angles(frequencies(SIZE), by), is_neox=True)


def difference(computed: Tensor, loaded: Tensor) -> float:
    """Of K in pages of one pool."""
    pool = torch.zeros(10, PAGE_TOKENS, HEADS, SIZE, dtype=computed.dtype)
    for pages, tensor in ((PAGES_A, computed), (PAGES_B, loaded)):
        rows = pool.flatten(0, 1)
        slots = torch.cat([torch.arange(page * PAGE_TOKENS, (page + 1) * PAGE_TOKENS) for page in pages])[:TOKENS]
        rows[slots] = tensor
    return largest_difference([torch.zeros_like(pool), pool], PAGES_A, PAGES_B, TOKENS)


def computed_and_loaded(dtype: torch.dtype, *, is_turned: bool = True) -> tuple[Tensor, Tensor]:
    """K at its positions as computed, and turned there from where it was saved; both rounded as stored."""
    at, by = torch.arange(TOKENS), torch.full((TOKENS,), 64 if is_turned else 0)
    plain = keys()
    saved = turned(plain, at).to(dtype)
    return turned(plain, at + by).to(dtype), turned(saved.float(), by).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_roundings_of_turned_keys_pass(dtype: torch.dtype) -> None:
    computed, loaded = computed_and_loaded(dtype)
    assert 0 < difference(computed, loaded) <= tolerance(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_wrong_dimension_beside_outliers_and_one_wrong_token_of_small_values_are_seen(dtype: torch.dtype) -> None:
    """Their largest difference is a hundredth of an outlier: less than a tenth, bfloat16's tolerance."""
    computed, loaded = computed_and_loaded(dtype, is_turned=False)
    for target, source in (((slice(None), 2, 70), (slice(None), 2, 71)), ((5, SMALL), (6, SMALL))):
        wrong = loaded.clone()
        wrong[target] = loaded[source]
        assert (computed.float() - wrong.float()).abs().max() / computed.float().abs().max() < 0.1
        assert difference(computed, wrong) > tolerance(dtype)


def test_a_dimension_near_zero_is_judged_by_its_heads_median_and_a_single_difference_has_a_cap() -> None:
    computed = keys().bfloat16()
    computed[:, 1, 9] = 1e-6
    loaded = computed.clone()
    loaded[:, 1, 9] *= -1
    assert difference(computed, loaded) < 1e-4
    loaded[3, 2, 70] += 1
    assert 0 < difference(computed, loaded) <= TOLERANCE[torch.bfloat16]
    loaded[3, 2, 70] += 3
    assert difference(computed, loaded) > TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_number_is_infinitely_wrong(value: float) -> None:
    computed = keys()
    loaded = computed.clone()
    loaded[3, 2, 70] = value
    assert difference(computed, loaded) == float("inf")
    assert difference(loaded, loaded) == float("inf")
