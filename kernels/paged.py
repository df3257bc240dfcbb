# SPDX-License-Identifier: Apache-2.0
"""Moving spans of K and V between the engine's paged blocks and the chunk pool, for all layers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kernels import compiled
from kernels.rope import RotaryFrequencies, rotate_keys, rotate_keys_reference, rotation_angles

# Bounds the temporaries of a long span; small ones also stay in the CPU's cache.
_TILE_TOKENS = 2048


@dataclass(frozen=True)
class LayerKV:
    """One layer's K and V in the engine and in the pool, all of one dtype and device.

    `key_blocks`, `value_blocks`: views `[blocks, block_size, H, D]` of the paged cache.
    `key_pool`, `value_pool`: views `[pages, page_tokens, H, D]` of the pool (`make_pool`). Any
    strides; D of K and V may differ.
    """

    key_blocks: Tensor
    value_blocks: Tensor
    key_pool: Tensor
    value_pool: Tensor
    frequencies: RotaryFrequencies

    @cached_property
    def compiled(self) -> "CompiledLayer | None":
        """The same memory for the compiled copies; None where torch's have to do."""
        views = (self.key_blocks, self.key_pool, self.value_blocks, self.value_pool)
        if not compiled.is_supported(*views):
            return None
        return CompiledLayer(*map(compiled.operand, views))


@dataclass(frozen=True)
class CompiledLayer:
    """A layer's operands as `kernels.compiled` takes them."""

    key_blocks: compiled.Operand
    key_pool: compiled.Operand
    value_blocks: compiled.Operand
    value_pool: compiled.Operand


def make_pool(blocks: Tensor, num_pages: int, page_tokens: int) -> Tensor:
    """Return an uninitialised pool `[num_pages, page_tokens, H, D]` for the operand in `blocks`.

    Within a page it has the order that `blocks` `[blocks, block_size, H, D]` has within a block.
    """
    sizes = (page_tokens, *blocks.shape[2:])
    outer_first = sorted(range(3), key=lambda dim: -blocks.stride(dim + 1))
    shape = (num_pages, *(sizes[dim] for dim in outer_first))
    pool = torch.empty(shape, dtype=blocks.dtype, device=blocks.device)
    return pool.permute(0, *(1 + outer_first.index(dim) for dim in range(3)))


def save_rows(layers: Sequence[LayerKV], slots: Tensor, rows: Tensor) -> None:
    """Copy K and V of engine `slots` to pool `rows` in every layer, unrotated.

    `slots` and `rows` are int64 `[n]`, n >= 0; a slot is block * block_size + offset. Rows must
    not repeat. Raises ValueError on unequal lengths, IndexError on a slot or row out of range.
    """
    if not _check_span(layers, slots, rows):
        return
    if (ready := _compiled(layers)) is not None:
        runs = compiled.find_runs(slots, rows, torch.zeros_like(rows), *_sizes(layers[0]))
        for layer in ready:
            compiled.copy_keys(layer.key_pool, layer.key_blocks, runs, to_blocks=False)
            compiled.copy_values(layer.value_pool, layer.value_blocks, runs, to_blocks=False)
        return
    for tile in _tiles(slots, rows):
        _save_tile(layers, *tile)


def _save_tile(layers: Sequence[LayerKV], slots: Tensor, rows: Tensor) -> None:
    for layer in layers:
        block, page = _address(layer.key_blocks, slots), _address(layer.key_pool, rows)
        layer.key_pool[page] = layer.key_blocks[block]
        layer.value_pool[page] = layer.value_blocks[block]


def load_rows(layers: Sequence[LayerKV], slots: Tensor, rows: Tensor, deltas: Tensor) -> None:
    """Copy K and V of pool `rows` to engine `slots` in every layer, K rotated by `deltas`.

    `slots`, `rows` and `deltas` are int64 `[n]`, n >= 0. Slots must not repeat. A token of delta 0
    is copied bit for bit. Raises ValueError on unequal lengths, IndexError on a slot or row out
    of range.
    """
    if not _check_span(layers, slots, rows, deltas):
        return
    if (ready := _compiled(layers)) is not None:
        _load_compiled(layers, ready, slots, rows, deltas)
        return
    for tile in _tiles(slots, rows, deltas):
        _load_tile(layers, *tile)


def _load_compiled(
    layers: Sequence[LayerKV], ready: Sequence[CompiledLayer], slots: Tensor, rows: Tensor, deltas: Tensor
) -> None:
    distinct, which = torch.unique(deltas, return_inverse=True)
    runs = compiled.find_runs(slots, rows, which, *_sizes(layers[0]))
    turns, angles = (distinct != 0).numpy(), _Angles(distinct)
    for layer, operands in zip(layers, ready, strict=True):
        cos, sin = angles.of(layer.frequencies)
        is_neox = layer.frequencies.is_neox
        compiled.load_keys(operands.key_blocks, operands.key_pool, runs, turns, cos, sin, is_neox)
        compiled.copy_values(operands.value_blocks, operands.value_pool, runs, to_blocks=True)


def _load_tile(layers: Sequence[LayerKV], slots: Tensor, rows: Tensor, deltas: Tensor) -> None:
    rotations = _Rotations(deltas)
    for layer in layers:
        block, page = _address(layer.key_blocks, slots), _address(layer.key_pool, rows)
        layer.key_blocks[block] = rotations.apply(layer.key_pool[page], layer.frequencies)
        layer.value_blocks[block] = layer.value_pool[page]


class _Angles:
    """cos and sin of `distinct` rotations, computed once per set of frequencies."""

    def __init__(self, distinct: Tensor) -> None:
        self._distinct = distinct
        self._tables: dict[int, tuple[Tensor, Tensor]] = {}

    def of(self, frequencies: RotaryFrequencies) -> tuple[Tensor, Tensor]:
        """Return float32 `[distinct, pairs]` each."""
        key = id(frequencies)
        if key not in self._tables:
            self._tables[key] = rotation_angles(frequencies, self._distinct)
        return self._tables[key]


class _Rotations:
    """The rotations of one span."""

    def __init__(self, deltas: Tensor) -> None:
        distinct, self.which = torch.unique(deltas, return_inverse=True)
        self.is_single = len(distinct) == 1
        self.angles = _Angles(distinct)
        self.still = (deltas == 0).nonzero()[:, 0]

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
        cos, sin = self.angles.of(frequencies)
        return (cos, sin) if self.is_single else (cos[self.which], sin[self.which])


def _tiles(*indices: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Cut index tensors of one length into tiles of at most _TILE_TOKENS."""
    return zip(*(torch.split(part, _TILE_TOKENS) for part in indices), strict=True)


def _compiled(layers: Sequence[LayerKV]) -> list[CompiledLayer] | None:
    """Return all layers for the compiled copies, or None if one of them needs torch's."""
    ready = [layer.compiled for layer in layers]
    return None if None in ready else [layer for layer in ready if layer is not None]


def _sizes(layer: LayerKV) -> tuple[int, int]:
    """Return tokens in a block and in a page; the same in all layers."""
    return layer.key_blocks.shape[1], layer.key_pool.shape[1]


def _address(view: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return block (or page) numbers and offsets in the block of slots (or rows)."""
    size = view.shape[1]
    return tokens // size, tokens % size


def _check_span(layers: Sequence[LayerKV], slots: Tensor, rows: Tensor, *others: Tensor) -> bool:
    """Validate a span against all layers; return whether there is anything to move."""
    lengths = [len(indices) for indices in (slots, rows, *others)]
    if len(set(lengths)) != 1:
        raise ValueError(f"slots, rows and deltas differ in length: {lengths}")
    if not lengths[0] or not layers:
        return False
    slot_bounds, row_bounds = torch.aminmax(slots), torch.aminmax(rows)
    for layer in layers:
        _check_bounds("slots", slot_bounds, layer.key_blocks.shape[0] * layer.key_blocks.shape[1])
        _check_bounds("rows", row_bounds, layer.key_pool.shape[0] * layer.key_pool.shape[1])
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
            block, page = divmod(slot, layer.key_blocks.shape[1]), divmod(row, layer.key_pool.shape[1])
            layer.key_pool[page] = layer.key_blocks[block]
            layer.value_pool[page] = layer.value_blocks[block]


def load_rows_reference(layers: Sequence[LayerKV], slots: Tensor, rows: Tensor, deltas: Tensor) -> None:
    """Do what load_rows does one token at a time; the tests' oracle."""
    for layer in layers:
        for slot, row, delta in zip(slots.tolist(), rows.tolist(), deltas.tolist(), strict=True):
            block, page = divmod(slot, layer.key_blocks.shape[1]), divmod(row, layer.key_pool.shape[1])
            key = layer.key_pool[page][None]
            if delta:
                cos, sin = rotation_angles(layer.frequencies, torch.tensor([delta]))
                key = rotate_keys_reference(key, cos, sin, layer.frequencies.is_neox)
            layer.key_blocks[block] = key[0]
            layer.value_blocks[block] = layer.value_pool[page]
