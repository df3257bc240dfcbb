# SPDX-License-Identifier: Apache-2.0
"""The reference copier, number by number: the oracle of tests and check scripts."""

import torch
from torch import Tensor

from kernels.paged import KVCopier
from kernels.rope import rotate_keys_reference, rotation_angles


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
