# SPDX-License-Identifier: Apache-2.0
"""Copies of the engine's blocks in host memory, by the kernels that move chunks."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from cache.tiers.kept import KeptMemory
from engine_ext.core.file_server import allocator
from engine_ext.core.moves import Moves, tokens_in
from engine_ext.core.pages import check_tensors, copy_tokens, fill_pages
from engine_ext.core.worker import WorkerHalf
from engine_ext.wire.prefix import blocks_per_file
from kernels.dispatch import copier_for
from kernels.paged import LayerKV, make_pool, pools_of


class BlockMover:
    """Has pages of its own on the device, for the tokens of one file.

    The engine's thread calls it: no device is waited for.
    """

    def __init__(self, half: WorkerHalf) -> None:
        self._block_tokens = half.engine_block_size
        self.num_blocks = blocks_per_file(self._block_tokens)
        """Blocks in a file."""
        self.num_tokens = self.num_blocks * self._block_tokens
        self.num_bytes = self.num_tokens * half.token_bytes
        self.forms = half.forms(self.num_tokens)
        """A file's tensors."""
        self.allocate = KeptMemory(allocator(half)).take
        """Gives memory for a file, which the device copies to best."""
        self._pages = range(-(-self.num_tokens // half.page_tokens))
        layers = [self._with_pages(layer, half.page_tokens) for layer in half.copier.layers]
        self._copier = copier_for(layers, half.reshape_and_cache)
        self._pools = pools_of(layers)
        self._device = half.device
        self._sent = deque[tuple[Moves, Mapping[str, Tensor]]]()

    def read(self, block_ids: Sequence[int], tensors: Mapping[str, Tensor]) -> Moves:
        """Copies KV in the blocks of one file to ``tensors`` of its :attr:`forms`.

        It is there once the returned moves are done, for which the engine's thread must not wait.
        """
        self._copier.save(self._slots(block_ids), torch.arange(self.num_tokens))
        copy_tokens(self._pools, self._pages, tensors)
        return self._marked()

    def write(self, block_ids: Sequence[int], tensors: Mapping[str, Tensor]) -> None:
        """Writes the last tokens of one file's KV, tensors of its :attr:`forms`, to blocks."""
        fill_pages(self._pools, self._pages, tensors)
        slots = self._slots(block_ids)
        rows = torch.arange(self.num_tokens - len(slots), self.num_tokens)
        self._copier.load(slots, rows, torch.zeros_like(rows))
        # Their memory, if it is pinned, must not be another file's before it was sent.
        self._sent.append((self._marked(), tensors))
        while self._sent and self._sent[0][0].is_done():
            self._sent.popleft()

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Raises :class:`engine_ext.core.pages.WrongPagesError` unless ``tensors`` are KV of one file."""
        check_tensors(self._pools, tensors, self.num_tokens)

    def _marked(self) -> Moves:
        """The copies that are queued so far."""
        moves = Moves(self._device)
        moves.queued()
        return moves

    def _with_pages(self, layer: LayerKV, page_tokens: int) -> LayerKV:
        keys, values = (
            make_pool(blocks, len(self._pages), page_tokens) for blocks in (layer.key_blocks, layer.value_blocks)
        )
        return replace(layer, key_pool=keys, value_pool=values)

    def _slots(self, block_ids: Sequence[int]) -> Tensor:
        return torch.from_numpy(tokens_in(block_ids, self._block_tokens))
