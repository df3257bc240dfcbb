# SPDX-License-Identifier: Apache-2.0
"""The reference copier, number by number, and the error that rotations may have: oracles of tests and device checks."""

import torch
from torch import Tensor

from kernels.layout import PagedTensor
from kernels.paged import KVCopier
from kernels.rope import RotaryFrequencies, rotate_keys_reference, rotation_angles

_ULP32 = 2.0**-23


class ReferenceCopier(KVCopier):
    """Naive, slow, and easy to verify."""

    name = "reference"

    def _save(self, slots: Tensor, rows: Tensor) -> None:
        for layer in self.layers:
            for slot, row in zip(slots.tolist(), rows.tolist(), strict=True):
                block, page = divmod(slot, layer.key_blocks.shape[1]), divmod(row, layer.key_pool.shape[1])
                layer.key_pool[page] = layer.key_blocks[block]
                layer.value_pool[page] = layer.value_blocks[block]

    def _load(self, slots: Tensor, rows: Tensor, deltas: Tensor) -> None:
        for layer in self.layers:
            for slot, row, delta in zip(slots.tolist(), rows.tolist(), deltas.tolist(), strict=True):
                block, page = divmod(slot, layer.key_blocks.shape[1]), divmod(row, layer.key_pool.shape[1])
                key = layer.key_pool[page][None]
                if delta:
                    cos, sin = rotation_angles(layer.frequencies, torch.tensor([delta]))
                    key = rotate_keys_reference(key, cos, sin, layer.is_neox)
                layer.key_blocks[block] = key[0]
                layer.value_blocks[block] = layer.value_pool[page]


def frequencies(width: int, theta: float = 10000.0, is_neox: bool = True) -> RotaryFrequencies:
    """Rotary frequencies of an ordinary model; on the CPU, since not every device has float64."""
    return RotaryFrequencies(theta ** -(torch.arange(0, width, 2, dtype=torch.float64) / width), is_neox)


def elements(view: Tensor | PagedTensor) -> Tensor:
    """The elements of blocks or of a pool, in the memory's own order of dimensions."""
    return view.tiles if isinstance(view, PagedTensor) else view


def rotation_error(seen: Tensor, right: Tensor, is_neox: bool) -> float:
    """Largest error of turned keys `[n, heads, width]`, as a share of the allowed one."""
    rounding = 0.0 if seen.dtype == torch.float32 else torch.finfo(seen.dtype).eps
    seen64, right64 = seen.double(), right.double()
    allowed = 2 * _ULP32 * _pair_lengths(right64, is_neox) + rounding * right64.abs()
    limits = torch.finfo(seen.dtype)
    allowed += limits.tiny * limits.eps  # the smallest number of all
    return float(((seen64 - right64).abs() / allowed).max())


def _pair_lengths(keys: Tensor, is_neox: bool) -> Tensor:
    """The length of the pair that each number belongs to."""
    if is_neox:
        first, second = keys.chunk(2, dim=-1)
        return torch.hypot(first, second).repeat(1, 1, 2)
    return torch.hypot(keys[..., ::2], keys[..., 1::2]).repeat_interleave(2, dim=-1)
