# SPDX-License-Identifier: Apache-2.0
"""Moving K and V on Ascend NPUs with torch_npu's operators, without Triton-Ascend."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kernels.paged import KVCopier, LayerKV, UnsupportedKVError, send, strided_blocks
from kernels.rope import AngleTables, RotaryFrequencies, distinct_deltas

ReshapeAndCache = Callable[..., Any]
"""vLLM-Ascend's cache writer, taking `key`, `value`, `key_cache`, `value_cache`, `slot_mapping` by name.

It selects torch_npu's operator that writes ND blocks on the device.
"""

_MAX_SLOT = 2**31 - 1
_MAX_ROTARY_DIM = 896
"""Limits of the operators: slots are int32; a rotated width is below this."""


class NpuCopier(KVCopier):
    """Reads by `index_select`, rotates by `npu_rotary_mul`, writes as the engine does; on the current stream."""

    name = "torch_npu"

    def __init__(self, layers: Sequence[LayerKV], reshape_and_cache: ReshapeAndCache) -> None:
        super().__init__(layers)
        for layer in layers:
            _check(layer)
        self._write = reshape_and_cache
        self._device = layers[0].key_blocks.device
        self._blocks = [strided_blocks(layer) for layer in layers]

    def _save(self, slots: Tensor, rows: Tensor) -> None:
        read, write = send(slots, self._device), send(rows.int(), self._device)
        for layer, (key_blocks, value_blocks) in zip(self.layers, self._blocks, strict=True):
            keys, values = _tokens(key_blocks, read), _tokens(value_blocks, read)
            self._store(keys, values, layer.key_pool, layer.value_pool, write)

    def _load(self, slots: Tensor, rows: Tensor, deltas: Tensor) -> None:
        read, write = send(rows, self._device), send(slots.int(), self._device)
        turn = self._turner(deltas) if bool(deltas.any()) else None
        for layer, blocks in zip(self.layers, self._blocks, strict=True):
            keys, values = _tokens(layer.key_pool, read), _tokens(layer.value_pool, read)
            self._store(keys if turn is None else turn(keys, layer.frequencies), values, *blocks, write)

    def _turner(self, deltas: Tensor) -> Callable[[Tensor, RotaryFrequencies], Tensor]:
        """Turns a layer's keys of the tokens that move by `deltas`."""
        distinct, which = distinct_deltas(deltas)
        turns, angles = send(which, self._device), AngleTables(distinct)
        is_still = None if bool(deltas.all()) else send(deltas == 0, self._device)[:, None, None]
        rotations: dict[int, tuple[Tensor, Tensor]] = {}

        def turn(keys: Tensor, frequencies: RotaryFrequencies) -> Tensor:
            if id(frequencies) not in rotations:
                # A row for each distinct rotation is sent, and read once per token on the device.
                cos, sin = (
                    send(_full_width(table, frequencies), self._device).index_select(1, turns)
                    for table in angles.of(frequencies)
                )
                rotations[id(frequencies)] = cos, sin
            rotated = _rotated(keys, *rotations[id(frequencies)], frequencies)
            # A rotation by zero is not the identity on -0.0, infinities and NaN.
            return rotated if is_still is None else torch.where(is_still, keys, rotated)

        return turn

    def _store(self, keys: Tensor, values: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
        self._write(key=keys, value=values, key_cache=key_cache, value_cache=value_cache, slot_mapping=slots)


def _tokens(view: Tensor, indices: Tensor) -> Tensor:
    """K or V of slots or rows, `[n, H, D]`, contiguous."""
    return view.view(-1, *view.shape[2:]).index_select(0, indices)


def _rotated(keys: Tensor, cos: Tensor, sin: Tensor, frequencies: RotaryFrequencies) -> Tensor:
    """`keys` `[n, H, D]` rotated in float32 and rounded once."""
    import torch_npu

    width = frequencies.rotary_dim
    mode = "half" if frequencies.is_neox else "interleave"
    turned = torch_npu.npu_rotary_mul(keys[None, ..., :width].float().contiguous(), cos, sin, rotary_mode=mode)[0]
    turned = turned.to(keys.dtype)
    return turned if width == keys.shape[-1] else torch.cat((turned, keys[..., width:]), dim=-1)


def _full_width(table: Tensor, frequencies: RotaryFrequencies) -> Tensor:
    """One number per pair, `[n, pairs]`, expanded to one per element: `[1, n, 1, 2 * pairs]`."""
    spread = torch.cat((table, table), dim=-1) if frequencies.is_neox else table.repeat_interleave(2, dim=-1)
    return spread[None, :, None]


def _check(layer: LayerKV) -> None:
    for view in (*strided_blocks(layer), layer.key_pool, layer.value_pool):
        if not view.is_contiguous():
            raise UnsupportedKVError(
                f"K or V has strides {view.stride()} for shape {tuple(view.shape)}; torch_npu's operators write "
                "contiguous [blocks, block size, heads, head size] (ND)"
            )
        if view.shape[0] * view.shape[1] > _MAX_SLOT:
            raise UnsupportedKVError(f"{view.shape[0]} blocks of {view.shape[1]} tokens: slots are int32")
    if layer.rotary_dim >= _MAX_ROTARY_DIM:
        raise UnsupportedKVError(
            f"RoPE turns {layer.rotary_dim} dims; npu_rotary_mul takes fewer than {_MAX_ROTARY_DIM}"
        )
