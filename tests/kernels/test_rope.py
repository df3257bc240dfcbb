# SPDX-License-Identifier: Apache-2.0
"""Frequencies are recovered exactly from a table; angles of large distances are rounded once."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from kernels.reference import frequencies
from kernels.rope import recover_frequencies, rotate_keys, rotation_angles


def inverse_frequencies(rotary_dim: int, theta: float = 10000.0) -> Tensor:
    """The engine's own formula, in float32."""
    return 1.0 / theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.float) / rotary_dim)


def table(inv_freq: Tensor, rows: int = 8192, magnitude: float = 1.0, scale: float = 1.0) -> Tensor:
    """The engine's own cos/sin table, in float32."""
    angles = torch.outer(torch.arange(rows, dtype=torch.float) / scale, inv_freq)
    return torch.cat((angles.cos() * magnitude, angles.sin() * magnitude), dim=-1)


@pytest.mark.parametrize("theta", [10000.0, 500000.0, 1e6])
@pytest.mark.parametrize("rotary_dim", [32, 64, 128, 256])
@pytest.mark.parametrize("rows", [2048, 8192, 20000])
def test_default_rope_is_recovered_exactly(theta: float, rotary_dim: int, rows: int) -> None:
    inv_freq = inverse_frequencies(rotary_dim, theta)
    found = recover_frequencies(table(inv_freq, rows), is_neox=False)
    assert found.rotary_dim == rotary_dim
    assert found.inv_freq.dtype == torch.float64
    assert torch.equal(found.inv_freq, inv_freq.double())


@pytest.mark.parametrize("scale", [2.0, 4.0, 3.0])
def test_linear_scaling_is_recovered_exactly(scale: float) -> None:
    inv_freq = inverse_frequencies(64)
    found = recover_frequencies(table(inv_freq, scale=scale), is_neox=True)
    assert torch.equal(found.inv_freq, (torch.tensor(1.0) / scale * inv_freq).double())


@pytest.mark.parametrize("magnitude", [1.2, 0.7])
@pytest.mark.parametrize("theta", [10000.0, 1e6])
def test_magnitude_is_removed(magnitude: float, theta: float) -> None:
    inv_freq = inverse_frequencies(128, theta).double()
    found = recover_frequencies(table(inv_freq.float(), magnitude=magnitude), is_neox=True).inv_freq
    assert torch.equal(found[inv_freq > 1e-3], inv_freq[inv_freq > 1e-3])
    assert ((found - inv_freq).abs() * 131072).max() < 1e-5


def test_frequencies_in_float64_pairs_that_never_turn_and_the_shortest_table() -> None:
    inv_freq = inverse_frequencies(64).double() / 3
    angles = torch.outer(torch.arange(8193, dtype=torch.float64), inv_freq)
    found = recover_frequencies(torch.cat((angles.cos(), angles.sin()), -1).float(), is_neox=True)
    assert ((found.inv_freq - inv_freq).abs() * 131072).max() < 1e-4
    inv_freq = inverse_frequencies(64)
    inv_freq[8:] = 0
    assert torch.equal(recover_frequencies(table(inv_freq), is_neox=True).inv_freq, inv_freq.double())
    inv_freq = inverse_frequencies(8, 100.0)
    assert torch.allclose(recover_frequencies(table(inv_freq, rows=4), True).inv_freq, inv_freq.double())


def with_entry(row: int, column: int, value: float) -> Tensor:
    wrong = table(inverse_frequencies(32), rows=64)
    wrong[row, column] = value
    return wrong


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (with_entry(0, 20, 0.5), "row 0"),
        (with_entry(0, 3, 0.5), "row 0"),
        (-table(inverse_frequencies(32), rows=64), "row 0"),
        (with_entry(1, 2, 0.3), "magnitude"),
        (with_entry(3, 2, float("nan")), "magnitude"),
        (table(-inverse_frequencies(32), rows=64), "outside"),
        (table(torch.zeros(16), rows=64), "outside"),
        (table(torch.full((4,), 3.5), rows=64), "outside"),
        (table(inverse_frequencies(32), rows=64)[[0, 1, 2, 4, 3]], "row 3"),
        (table(inverse_frequencies(32), rows=64)[[0, 1, 2, 3, 5, 4]], "row 4"),
        (table(inverse_frequencies(32), rows=3), "rows"),
        (table(inverse_frequencies(32), rows=64)[:, :-1], "rows"),
        (table(inverse_frequencies(32), rows=64).bfloat16(), "float32"),
        (torch.ones(64), "float32"),
    ],
)
def test_other_tables_are_refused(wrong: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        recover_frequencies(wrong, is_neox=True)


def test_angles_of_large_deltas_are_rounded_once() -> None:
    freqs = frequencies(64)
    deltas = torch.tensor([131072, -131072, 0, 1])
    cos, sin = rotation_angles(freqs, deltas)
    exact = deltas.double()[:, None] * freqs.inv_freq
    assert cos.dtype == sin.dtype == torch.float32
    assert torch.equal(cos, exact.cos().float())
    assert torch.equal(sin, exact.sin().float())
    assert torch.equal(cos[2], torch.ones(32))
    assert torch.equal(sin[2], torch.zeros(32))


DELTAS = st.integers(-131072, 131072)


@given(DELTAS, DELTAS)
@example(131072, -131072)
def test_one_turn_after_another_is_their_sum(a: int, b: int) -> None:
    """Of the reference, too, as which every copier turns keys (`test_copiers.py`)."""
    keys, rotations = torch.randn(6, 2, 64, generator=torch.Generator().manual_seed(0)), frequencies(64)
    turned = [rotate_keys(keys, *rotation_angles(rotations, torch.tensor([delta])), True) for delta in (a, a + b)]
    twice = rotate_keys(turned[0], *rotation_angles(rotations, torch.tensor([b])), True)
    assert torch.allclose(twice, turned[1], 0, 3e-6)


def test_strided_keys() -> None:
    keys = torch.randn(2, 64, 5).permute(2, 0, 1)
    cos, sin = rotation_angles(frequencies(64), torch.tensor([9]))
    assert torch.equal(rotate_keys(keys, cos, sin, True), rotate_keys(keys.contiguous(), cos, sin, True))
