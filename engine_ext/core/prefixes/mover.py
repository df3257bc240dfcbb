# SPDX-License-Identifier: Apache-2.0
"""Copies of the engine's blocks in host memory, by the kernels that move chunks."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from engine_ext.core.moves import tokens_in
from engine_ext.core.pages import check_tensors, fill_pages, tokens_of
from engine_ext.core.worker import WorkerHalf
from engine_ext.wire.prefix import blocks_per_file
from kernels.dispatch import copier_for
from kernels.paged import LayerKV, make_pool, pools_of


class BlockMover:
    """Has pages of its own on the device, for the tokens of one file."""

    def __init__(self, half: WorkerHalf) -> None:
        self._block_tokens = half.engine_block_size
        self.num_blocks = blocks_per_file(self._block_tokens)
        """Blocks in a file."""
        self.num_tokens = self.num_blocks * self._block_tokens
        self.num_bytes = self.num_tokens * half.token_bytes
        self._pages = range(-(-self.num_tokens // half.page_tokens))
        layers = [self._with_pages(layer, half.page_tokens) for layer in half.copier.layers]
        self._copier = copier_for(layers, half.reshape_and_cache)
        self._pools = pools_of(layers)

    def read(self, block_ids: Sequence[int]) -> dict[str, Tensor]:
        """KV in the blocks of one file, by layer: ``[tokens, heads, size]``, contiguous, on the CPU."""
        self._copier.save(self._slots(block_ids), torch.arange(self.num_tokens))
        return {
            name: tokens_of(pool, self._pages, self.num_tokens).cpu().contiguous() for name, pool in self._pools.items()
        }

    def write(self, block_ids: Sequence[int], tensors: Mapping[str, Tensor]) -> None:
        """Writes the last tokens of one file's KV, as :meth:`read` gave it, to blocks."""
        for name, tensor in tensors.items():
            fill_pages(self._pools[name], self._pages, tensor)
        slots = self._slots(block_ids)
        rows = torch.arange(self.num_tokens - len(slots), self.num_tokens)
        self._copier.load(slots, rows, torch.zeros_like(rows))

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Raises :class:`engine_ext.core.pages.WrongPagesError` unless ``tensors`` are KV of one file."""
        check_tensors(self._pools, tensors, self.num_tokens)

    def _with_pages(self, layer: LayerKV, page_tokens: int) -> LayerKV:
        keys, values = (
            make_pool(blocks, len(self._pages), page_tokens) for blocks in (layer.key_blocks, layer.value_blocks)
        )
        return replace(layer, key_pool=keys, value_pool=values)

    def _slots(self, block_ids: Sequence[int]) -> Tensor:
        return torch.from_numpy(tokens_in(block_ids, self._block_tokens))
