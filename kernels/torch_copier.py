# SPDX-License-Identifier: Apache-2.0
"""Moving K and V by torch's indexing: any device, dtype and layout."""

from collections.abc import Iterator

import torch
from torch import Tensor

from kernels.layout import PagedTensor
from kernels.paged import KVCopier
from kernels.rope import Rotations

# Bounds the temporaries of a long span; small ones also stay in the CPU's cache.
_TILE_TOKENS = 2048


class TorchCopier(KVCopier):
    """Gathers and scatters tile by tile, layer by layer."""

    name = "torch"

    def _save(self, slots: Tensor, rows: Tensor) -> None:
        for tile in self._tiles(slots, rows):
            for layer in self.layers:
                block, page = _address(layer.key_blocks, tile[0]), _address(layer.key_pool, tile[1])
                layer.key_pool[page] = layer.key_blocks[block]
                layer.value_pool[page] = layer.value_blocks[block]

    def _load(self, slots: Tensor, rows: Tensor, deltas: Tensor) -> None:
        for tile in self._tiles(slots, rows, deltas):
            rotations = Rotations(tile[2])
            for layer in self.layers:
                block, page = _address(layer.key_blocks, tile[0]), _address(layer.key_pool, tile[1])
                layer.key_blocks[block] = rotations.apply(layer.key_pool[page], layer.frequencies)
                layer.value_blocks[block] = layer.value_pool[page]

    def _tiles(self, *indices: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Cut index tensors into tiles of at most _TILE_TOKENS, on the layers' device."""
        device = self.layers[0].key_pool.device
        return zip(*(torch.split(part.to(device), _TILE_TOKENS) for part in indices), strict=True)


def _address(view: Tensor | PagedTensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return block (or page) numbers and offsets in the block of slots (or rows)."""
    size = view.shape[1]
    return tokens // size, tokens % size
