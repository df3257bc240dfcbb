# SPDX-License-Identifier: Apache-2.0
"""Moving K and V with Triton, in one launch per form of layers."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from kernels.paged import KVCopier, LayerKV, UnsupportedKVError, send, strided_blocks
from kernels.rope import RotaryFrequencies, distinct_deltas, rotation_angles
from kernels.triton_kernel import move_tokens

MAX_HEAD_SIZE = 1024
"""A tile has whole heads of its tokens."""

_TILE_ELEMENTS = 4096
_ALIGNMENT = 16
"""Elements of a vector of the widest loads."""
_MAX_PROGRAMS = 65535

_NO_ROTATION: dict[str, Any] = {
    "turns": None,
    "cos": None,
    "sin": None,
    "tables": None,
    "num_turns": 0,
    "PAIRS": 0,
    "PAIRS_WIDTH": 1,
    "IS_NEOX": True,
}


class TritonCopier(KVCopier):
    """Works on the current stream, without waiting for it.

    Indices and angles are copied from pinned memory, which torch reuses only after the copy has run.
    """

    name = "Triton"

    def __init__(self, layers: Sequence[LayerKV]) -> None:
        super().__init__(layers)
        for layer in layers:
            _check_head_sizes(layer)
        self._device = layers[0].key_blocks.device
        self._most_programs = _most_programs(self._device)
        self._groups = [_Group(parts) for parts in _alike(layers)]

    def _save(self, slots: Tensor, rows: Tensor) -> None:
        on_device = self._send_indices(slots, rows)
        for group in self._groups:
            self._move(group.blocks, group.pool, on_device[0], on_device[1], len(slots))

    def _load(self, slots: Tensor, rows: Tensor, deltas: Tensor) -> None:
        distinct, which = distinct_deltas(deltas)
        turns = torch.arange(len(distinct)).masked_fill(distinct == 0, -1)
        on_device = self._send_indices(slots, rows, turns[which])
        for group in self._groups:
            rotation = _NO_ROTATION
            if group.turns:
                rotation = _rotation(on_device[2], send(group.angles(distinct), self._device), group)
            self._move(group.pool, group.blocks, on_device[1], on_device[0], len(slots), rotation)

    def _move(
        self,
        source: "_Operands",
        target: "_Operands",
        source_tokens: Tensor,
        target_tokens: Tensor,
        num_tokens: int,
        rotation: dict[str, Any] = _NO_ROTATION,
    ) -> None:
        """Launches the kernel, for all layers of ``source`` and ``target``."""
        num_heads, head_size = source.first.shape[2:]
        width = triton.next_power_of_2(head_size)
        tile = max(1, _TILE_ELEMENTS // width)
        num_tiles = -(-num_tokens // tile)
        num_items = num_tiles * num_heads * len(source.layers)
        move_tokens[(min(num_items, self._most_programs),)](
            source.first,
            target.first,
            source.layers,
            target.layers,
            source_tokens,
            target_tokens,
            num_tokens,
            num_tiles,
            num_heads,
            num_items,
            *source.first.stride(),
            *target.first.stride(),
            SOURCE_SIZE=source.first.shape[1],
            TARGET_SIZE=target.first.shape[1],
            ALIGNED=_ALIGNMENT if source.is_aligned and target.is_aligned else 1,
            HEAD_SIZE=head_size,
            WIDTH=width,
            TILE=tile,
            **rotation,
        )

    def _send_indices(self, *parts: Tensor) -> Tensor:
        """Int64 `[parts, n or n + 1]`; rows aligned to 16 bytes let Triton compile once."""
        num_tokens = len(parts[0])
        indices = torch.zeros(len(parts), num_tokens + num_tokens % 2, dtype=torch.int64)
        for row, part in zip(indices, parts, strict=True):
            row[:num_tokens] = part
        return send(indices, self._device)


class _Operands:
    """K or V of several layers: views `[blocks, size, H, D]` of the same strides."""

    def __init__(self, views: Sequence[Tensor]) -> None:
        self.first = views[0]
        distances = [(view.data_ptr() - self.first.data_ptr()) // view.element_size() for view in views]
        self.layers = torch.tensor(distances, device=self.first.device)
        self.is_aligned = all(distance % _ALIGNMENT == 0 for distance in distances)


class _Part(NamedTuple):
    """K of a layer, or V, which nothing turns."""

    blocks: Tensor
    pool: Tensor
    frequencies: RotaryFrequencies | None

    @property
    def views(self) -> tuple[Any, ...]:
        """Dtype, sizes and strides, which the parts of a launch share."""
        return tuple((view.dtype, tuple(view.shape[1:]), view.stride()) for view in (self.blocks, self.pool))


class _Group:
    """K and V of one layout and one form of rotation."""

    def __init__(self, parts: Sequence[_Part]) -> None:
        self.blocks = _Operands([part.blocks for part in parts])
        self.pool = _Operands([part.pool for part in parts])
        distinct = {id(part.frequencies): part.frequencies for part in parts if part.frequencies}
        self._frequencies = list(distinct.values())
        tables = [list(distinct).index(id(part.frequencies)) if part.frequencies else -1 for part in parts]
        self.tables = torch.tensor(tables, device=self.blocks.first.device)

    @property
    def turns(self) -> bool:
        """Whether there is K among the parts."""
        return bool(self._frequencies)

    @property
    def is_neox(self) -> bool:
        """Whether RoPE pairs the halves of a head, not neighbours."""
        return self._frequencies[0].is_neox

    def angles(self, deltas: Tensor) -> Tensor:
        """cos and sin, float32 `[2, tables, deltas, pairs]`."""
        return torch.stack([torch.stack(rotation_angles(each, deltas)) for each in self._frequencies], dim=1)


def _rotation(turns: Tensor, angles: Tensor, group: _Group) -> dict[str, Any]:
    """The kernel's arguments for a rotation."""
    pairs = angles.shape[-1]
    return {
        "turns": turns,
        "cos": angles[0],
        "sin": angles[1],
        "tables": group.tables,
        "num_turns": angles.shape[2],
        "PAIRS": pairs,
        "PAIRS_WIDTH": triton.next_power_of_2(pairs),
        "IS_NEOX": group.is_neox,
    }


def _most_programs(device: torch.device) -> int:
    """Most programs of a launch; on Ascend, which starts them slowly, one per vector core."""
    if device.type != "npu":
        return _MAX_PROGRAMS
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index or 0)
    return int(properties["num_vectorcore"])


def _alike(layers: Sequence[LayerKV]) -> Iterable[list[_Part]]:
    """K and V of all layers, in groups of one form; V joins K of its layout."""
    groups: dict[Any, list[_Part]] = {}
    for layer in layers:
        keys = _Part(strided_blocks(layer)[0], layer.key_pool, layer.frequencies)
        groups.setdefault((keys.views, layer.is_neox, layer.rotary_dim), []).append(keys)
    for layer in layers:
        values = _Part(strided_blocks(layer)[1], layer.value_pool, None)
        form = next((form for form in groups if form[0] == values.views), (values.views,))
        groups.setdefault(form, []).append(values)
    return groups.values()


def _check_head_sizes(layer: LayerKV) -> None:
    sizes = (layer.key_blocks.shape[3], layer.value_blocks.shape[3])
    if max(sizes) > MAX_HEAD_SIZE:
        raise UnsupportedKVError(f"head sizes of K and V are {sizes}; the Triton kernel takes up to {MAX_HEAD_SIZE}")
