# SPDX-License-Identifier: Apache-2.0
"""RoPE: the engine's frequencies recovered from its table, and rotation of keys by a delta."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_MAX_REFINED_ROW = 8192
_ROW_TOLERANCE = 1e-3
# A table entry is cos or sin rounded to float32, times a magnitude, rounded again.
_TABLE_ERROR = 2.0**-22


@dataclass(frozen=True)
class RotaryFrequencies:
    """Angle per position of each rotated pair; `inv_freq` is float64 `[rotary_dim / 2]`, on the CPU.

    Angles are computed there: not every device has float64, and no device need be waited for.

    `is_neox`: a pair is (i, i + rotary_dim / 2); otherwise (2i, 2i + 1), as in GPT-J.
    """

    inv_freq: Tensor
    is_neox: bool

    @property
    def rotary_dim(self) -> int:
        """Number of leading dims of a head that are rotated."""
        return 2 * self.inv_freq.numel()


def recover_frequencies(cos_sin_table: Tensor, is_neox: bool) -> RotaryFrequencies:
    """Recover the frequencies from an engine's table, float32 `[max_pos, rotary_dim]`.

    Row p is `[m * cos(p * f) ..., m * sin(p * f) ...]` with one magnitude m (YaRN). The engine
    holds f in float32, and its product with a power of two is exact, so those rows carry the
    unrounded angle and f comes back bit for bit. That matters: at a delta of 131072 an error
    of 6e-8 in f would turn the key by 0.008 rad. With m other than 1, an f below 1e-3 may come
    back one float32 step off, since its rows all round alike: 1e-5 rad at that delta.

    A pair that no row turns (Gemma 4's proportional RoPE) has frequency 0.

    Raises ValueError if the table is not float32, has fewer than four rows, or is not a
    rotation table with angles in (0, pi] per position.
    """
    if cos_sin_table.dtype != torch.float32 or cos_sin_table.dim() != 2:
        raise ValueError(f"expected a float32 [max_pos, rotary_dim] table, got {cos_sin_table.dtype}")
    if len(cos_sin_table) < 4 or cos_sin_table.shape[1] % 2:
        raise ValueError(f"expected >= 4 rows of even length, got shape {tuple(cos_sin_table.shape)}")
    _check_origin(cos_sin_table)
    turns = (cos_sin_table != cos_sin_table[0]).any(0).view(2, -1).any(0)
    table = cos_sin_table[:, turns.repeat(2)] if turns.any() else cos_sin_table
    first = _row_angles(table, 1)
    if not bool(((first > 0) & (first <= math.pi)).all()):
        raise ValueError(f"angles of row 1 lie outside (0, pi]: {first.tolist()}")
    _deviation(table, 3, first)
    inv_freq = torch.zeros(len(turns), dtype=torch.float64).masked_scatter(turns, _refine(table, first))
    return RotaryFrequencies(inv_freq, is_neox)


def _check_origin(table: Tensor) -> None:
    cos, sin = table[0].chunk(2)
    if not bool((sin == 0).all() and (cos > 0).all() and (cos == cos[0]).all()):
        raise ValueError("row 0 is not cos = magnitude, sin = 0")


def _row_angles(table: Tensor, row: int) -> Tensor:
    """Return angles in [-pi, pi], float64; raise ValueError if the row's magnitude is not row 0's."""
    cos, sin = table[row].double().chunk(2)
    magnitude = float(table[0, 0])
    if not bool(((torch.hypot(cos, sin) / magnitude - 1).abs() < _ROW_TOLERANCE).all()):
        raise ValueError(f"row {row} does not have the magnitude {magnitude} of row 0")
    return torch.atan2(sin, cos)


def _deviation(table: Tensor, row: int, inv_freq: Tensor) -> Tensor:
    """Return how far the row's angles lie from `row * inv_freq`, modulo full turns."""
    difference = _row_angles(table, row) - row * inv_freq
    deviation = torch.remainder(difference + math.pi, 2 * math.pi) - math.pi
    if not bool((deviation.abs() < _ROW_TOLERANCE).all()):
        raise ValueError(f"row {row} does not continue row 1: off by {float(deviation.abs().max())} rad")
    return deviation


def _refine(table: Tensor, inv_freq: Tensor) -> Tensor:
    """Average the frequency over rows 1, 2, 4, ... in float64, then snap it to float32."""
    row, total = 1, torch.zeros_like(inv_freq)
    weights = torch.zeros_like(inv_freq)
    while row < len(table) and row <= _MAX_REFINED_ROW:
        seen = inv_freq + _deviation(table, row, inv_freq) / row
        # An angle's error is absolute above 1 rad, relative below: that of f is min(1 / row, f).
        weight = torch.clamp(1 / inv_freq, min=row) ** 2
        total, weights = total + weight * seen, weights + weight
        inv_freq, row = total / weights, 2 * row
    snapped = inv_freq.float().double()
    error = _TABLE_ERROR * torch.clamp(inv_freq, max=2 / row)
    return torch.where((snapped - inv_freq).abs() <= error, snapped, inv_freq)


def rotation_angles(freqs: RotaryFrequencies, deltas: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin, float32 `[n, rotary_dim / 2]`, of rotations by int64 `deltas` `[n]`.

    The angle is formed in float64 and rounded once, after cos and sin: a large delta loses nothing.
    Computed on the CPU and returned where `deltas` lie.
    """
    angles = deltas.to("cpu", torch.float64)[:, None] * freqs.inv_freq
    return angles.cos().float().to(deltas.device), angles.sin().float().to(deltas.device)


def distinct_deltas(deltas: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distinct `deltas`, ascending, and each token's index in them: int64 `[n]`, on the CPU.

    Quick where tokens of equal delta follow one another, as those of a segment do: only runs are sorted.
    """
    array = deltas.numpy()
    starts = np.flatnonzero(np.diff(array, prepend=~array[:1]))
    distinct, turn = np.unique(array[starts], return_inverse=True)
    which = np.repeat(turn, np.diff(starts, append=len(array)))
    return torch.from_numpy(distinct), torch.from_numpy(which)


class AngleTables:
    """cos and sin of `distinct` rotations, int64 `[distinct]`, computed once per set of frequencies."""

    def __init__(self, distinct: Tensor) -> None:
        self._distinct = distinct
        self._tables: dict[int, tuple[Tensor, Tensor]] = {}

    def of(self, frequencies: RotaryFrequencies) -> tuple[Tensor, Tensor]:
        """Return float32 `[distinct, pairs]` each."""
        key = id(frequencies)
        if key not in self._tables:
            self._tables[key] = rotation_angles(frequencies, self._distinct)
        return self._tables[key]


def rotate_keys(keys: Tensor, cos: Tensor, sin: Tensor, is_neox: bool) -> Tensor:
    """Return `keys` `[n, H, D]` rotated, as a new tensor of the same dtype.

    `cos` and `sin` are float32 `[n, rotary_dim / 2]`, or `[1, rotary_dim / 2]` for one rotation
    of all tokens. Dims from rotary_dim on are copied. Computed in float32, cast once at the end.
    """
    rotary_dim = 2 * cos.shape[-1]
    source = keys.float()
    rotated = torch.empty_like(source, memory_format=torch.contiguous_format)
    rotated[..., rotary_dim:] = source[..., rotary_dim:]
    # One multiplication over whole rows: over half rows it takes twice as long on a CPU.
    torch.mul(source[..., :rotary_dim], _per_dim(cos, is_neox)[:, None], out=rotated[..., :rotary_dim])
    first, second = _pairs(source, rotary_dim, is_neox)
    first_out, second_out = _pairs(rotated, rotary_dim, is_neox)
    first_out.addcmul_(second, sin[:, None], value=-1)
    second_out.addcmul_(first, sin[:, None])
    return rotated.to(keys.dtype)


def _per_dim(cos: Tensor, is_neox: bool) -> Tensor:
    """Spread one cos per pair, `[n, rotary_dim / 2]`, over the dims of the pairs."""
    return torch.cat((cos, cos), dim=-1) if is_neox else cos.repeat_interleave(2, dim=-1)


def _pairs(keys: Tensor, rotary_dim: int, is_neox: bool) -> tuple[Tensor, Tensor]:
    """Return views of the first and of the second members of all pairs."""
    if is_neox:
        return keys[..., : rotary_dim // 2], keys[..., rotary_dim // 2 : rotary_dim]
    return keys[..., 0:rotary_dim:2], keys[..., 1:rotary_dim:2]


class Rotations:
    """Rotations of tokens by int64 `deltas` `[n]`, for layer after layer, on CPUs: a device would be waited for."""

    def __init__(self, deltas: Tensor) -> None:
        distinct, self._which = torch.unique(deltas, return_inverse=True)
        self._is_single = len(distinct) == 1
        self._angles = AngleTables(distinct)
        self._still = (deltas == 0).nonzero()[:, 0]

    def apply(self, keys: Tensor, frequencies: RotaryFrequencies) -> Tensor:
        """Return `keys` `[n, H, D]` rotated; `keys` itself if nothing turns."""
        if len(self._still) == len(keys):
            return keys
        cos, sin = self._angles.of(frequencies)
        if not self._is_single:
            cos, sin = cos[self._which], sin[self._which]
        rotated = rotate_keys(keys, cos, sin, frequencies.is_neox)
        if len(self._still):
            # A rotation by zero is not the identity on -0.0, infinities and NaN.
            rotated[self._still] = keys[self._still]
        return rotated


def rotate_keys_reference(keys: Tensor, cos: Tensor, sin: Tensor, is_neox: bool) -> Tensor:
    """Rotate like rotate_keys, one Python float at a time; the tests' oracle."""
    rotated, pairs = keys.clone(), cos.shape[-1]
    for token in range(keys.shape[0]):
        c, s = (table[token if len(table) > 1 else 0].tolist() for table in (cos, sin))
        for head in range(keys.shape[1]):
            for pair in range(pairs):
                i, j = (pair, pair + pairs) if is_neox else (2 * pair, 2 * pair + 1)
                x, y = float(keys[token, head, i]), float(keys[token, head, j])
                rotated[token, head, i] = x * c[pair] - y * s[pair]
                rotated[token, head, j] = y * c[pair] + x * s[pair]
    return rotated
