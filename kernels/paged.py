# SPDX-License-Identifier: Apache-2.0
"""Moving spans of K and V between the engine's paged blocks and the chunk pool, for all layers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.rope import RotaryFrequencies, rotate_keys, rotate_keys_reference, rotation_angles

# Bounds the temporaries of a long span; small ones also stay in the CPU's cache.
_TILE_TOKENS = 2048


@dataclass(frozen=True)
class LayerKV:
    """One layer's K and V in the engine and in the pool, all of one dtype and device.

    `key_blocks`, `value_blocks`: views `[blocks, block_size, H, D]` of the paged cache, any
    strides. `key_pool`, `value_pool`: contiguous `[pool_tokens, H, D]`. D of K and V may differ.
    """

    key_blocks: Tensor
    value_blocks: Tensor
    key_pool: Tensor
    value_pool: Tensor
    frequencies: RotaryFrequencies


def save_rows(layers: Sequence[LayerKV], slots: Tensor, rows: Tensor) -> None:
    """Copy K and V of engine `slots` to pool `rows` in every layer, unrotated.

    `slots` and `rows` are int64 `[n]`, n >= 0; a slot is block * block_size + offset. Rows must
    not repeat. Raises ValueError on unequal lengths, IndexError on a slot or row out of range.
    """
    if not _check_span(layers, slots, rows):
        return
    for tile in _tiles(slots, rows):
        _save_tile(layers, *tile)


def _save_tile(layers: Sequence[LayerKV], slots: Tensor, rows: Tensor) -> None:
    pool_index = _pool_index(rows)
    for layer in layers:
        address = _address(layer, slots)
        layer.key_pool[pool_index] = layer.key_blocks[address]
        layer.value_pool[pool_index] = layer.value_blocks[address]


def load_rows(layers: Sequence[LayerKV], slots: Tensor, rows: Tensor, deltas: Tensor) -> None:
    """Copy K and V of pool `rows` to engine `slots` in every layer, K rotated by `deltas`.

    `slots`, `rows` and `deltas` are int64 `[n]`, n >= 0. Slots must not repeat. A token of delta 0
    is copied bit for bit. Raises ValueError on unequal lengths, IndexError on a slot or row out
    of range.
    """
    if not _check_span(layers, slots, rows, deltas):
        return
    for tile in _tiles(slots, rows, deltas):
        _load_tile(layers, *tile)


def _load_tile(layers: Sequence[LayerKV], slots: Tensor, rows: Tensor, deltas: Tensor) -> None:
    pool_index, rotations = _pool_index(rows), _Rotations(deltas)
    for layer in layers:
        address = _address(layer, slots)
        layer.key_blocks[address] = rotations.apply(layer.key_pool[pool_index], layer.frequencies)
        layer.value_blocks[address] = layer.value_pool[pool_index]


class _Rotations:
    """The rotations of one span, with cos and sin computed once per set of frequencies."""

    def __init__(self, deltas: Tensor) -> None:
        self.distinct, self.which = torch.unique(deltas, return_inverse=True)
        self.still = (deltas == 0).nonzero()[:, 0]
        self.tables: dict[int, tuple[Tensor, Tensor]] = {}

    def apply(self, keys: Tensor, frequencies: RotaryFrequencies) -> Tensor:
        """Return `keys` `[n, H, D]` rotated; `keys` itself if nothing turns."""
        if len(self.still) == len(keys):
            return keys
        rotated = rotate_keys(keys, *self._table(frequencies), frequencies.is_neox)
        if len(self.still):
            # A rotation by zero is not the identity on -0.0, infinities and NaN.
            rotated[self.still] = keys[self.still]
        return rotated

    def _table(self, frequencies: RotaryFrequencies) -> tuple[Tensor, Tensor]:
        key = id(frequencies)
        if key not in self.tables:
            cos, sin = rotation_angles(frequencies, self.distinct)
            one = len(self.distinct) == 1
            self.tables[key] = (cos, sin) if one else (cos[self.which], sin[self.which])
        return self.tables[key]


def _tiles(*indices: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Cut index tensors of one length into tiles of at most _TILE_TOKENS."""
    return zip(*(torch.split(part, _TILE_TOKENS) for part in indices), strict=True)


def _pool_index(rows: Tensor) -> slice | Tensor:
    """Return `rows` as a slice where they ascend by one: that spares a gather per operand."""
    first = int(rows[0])
    if torch.equal(rows, torch.arange(first, first + len(rows), device=rows.device)):
        return slice(first, first + len(rows))
    return rows


def _address(layer: LayerKV, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Return block numbers and offsets in the block."""
    block_size = layer.key_blocks.shape[1]
    return slots // block_size, slots % block_size


def _check_span(layers: Sequence[LayerKV], slots: Tensor, rows: Tensor, *others: Tensor) -> bool:
    """Validate a span against all layers; return whether there is anything to move."""
    lengths = [len(indices) for indices in (slots, rows, *others)]
    if len(set(lengths)) != 1:
        raise ValueError(f"slots, rows and deltas differ in length: {lengths}")
    if not lengths[0]:
        return False
    slot_bounds, row_bounds = torch.aminmax(slots), torch.aminmax(rows)
    for layer in layers:
        _check_bounds("slots", slot_bounds, layer.key_blocks.shape[0] * layer.key_blocks.shape[1])
        _check_bounds("rows", row_bounds, len(layer.key_pool))
    return True


def _check_bounds(name: str, bounds: Sequence[Tensor], size: int) -> None:
    # Indexing would let a negative number wrap around to another request's block.
    low, high = int(bounds[0]), int(bounds[1])
    if low < 0 or high >= size:
        raise IndexError(f"{name} {low}..{high} are not all within 0..{size - 1}")


def save_rows_reference(layers: Sequence[LayerKV], slots: Tensor, rows: Tensor) -> None:
    """Do what save_rows does one token at a time; the tests' oracle."""
    for layer in layers:
        for slot, row in zip(slots.tolist(), rows.tolist(), strict=True):
            block, offset = divmod(slot, layer.key_blocks.shape[1])
            layer.key_pool[row] = layer.key_blocks[block, offset]
            layer.value_pool[row] = layer.value_blocks[block, offset]


def load_rows_reference(layers: Sequence[LayerKV], slots: Tensor, rows: Tensor, deltas: Tensor) -> None:
    """Do what load_rows does one token at a time; the tests' oracle."""
    for layer in layers:
        for slot, row, delta in zip(slots.tolist(), rows.tolist(), deltas.tolist(), strict=True):
            block, offset = divmod(slot, layer.key_blocks.shape[1])
            key = layer.key_pool[row : row + 1]
            if delta:
                cos, sin = rotation_angles(layer.frequencies, torch.tensor([delta]))
                key = rotate_keys_reference(key, cos, sin, layer.frequencies.is_neox)
            layer.key_blocks[block, offset] = key[0]
            layer.value_blocks[block, offset] = layer.value_pool[row]
