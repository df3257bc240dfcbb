# SPDX-License-Identifier: Apache-2.0
"""Blocks to and from files on a device, which the engine's thread doesn't wait for."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from cache.tiers import kept
from engine_ext.core import worker as worker_module
from engine_ext.core.prefixes import mover as mover_module
from engine_ext.core.prefixes.mover import BlockMover
from engine_ext.core.worker import WorkerHalf
from kernels.layout import PagedTensor
from kernels.paged import LayerKV, make_pool
from kernels.reference import frequencies
from tests.support.pinned import PinnedMemory
from tests.support.streams import DEVICE, Machine, QueuedCopier, in_thread

BLOCK, HEADS, SIZE, BLOCKS, LAYERS = 64, 2, 4, 8, 2


class Worker:
    """A worker's blocks and mover, on a device that runs nothing by itself."""

    def __init__(self) -> None:
        never: Any = SimpleNamespace(choice=lambda options: options[0])
        self.machine = Machine(never)
        self.blocks = [torch.zeros(BLOCKS, BLOCK, HEADS, SIZE) for _ in range(2 * LAYERS)]

    def prepare(self) -> None:
        self.machine.set_device(DEVICE)
        self.machine.set_stream(self.machine.Stream())
        half, views = WorkerHalf(0, 32, BLOCK), list(map(PagedTensor.of, self.blocks))
        pools = [make_pool(each, 2, 32) for each in views]
        half.attach([LayerKV(*views[i : i + 2], *pools[i : i + 2], frequencies(SIZE)) for i in range(0, len(views), 2)])
        half.token_bytes = 2 * LAYERS * HEADS * SIZE * 4
        self.mover = BlockMover(half)

    def compute(self, seed: int, block_ids: list[int]) -> None:
        """The engine computes blocks, which it queues."""
        kv = kv_of(seed)

        def write() -> None:
            for tensor, layer in zip(self.blocks, kv, strict=True):
                tensor[block_ids] = layer.view(len(block_ids), BLOCK, HEADS, SIZE)

        self.machine.current_stream().queue(write)


def kv_of(seed: int) -> list[Tensor]:
    """KV of one file, for each layer's keys and values."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2 * BLOCK, HEADS, SIZE, generator=generator) for _ in range(2 * LAYERS)]


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    worker = Worker()
    machine, made = worker.machine, make_pool
    monkeypatch.setattr(torch, "get_device_module", lambda device: machine)
    for module in (worker_module, mover_module):
        monkeypatch.setattr(module, "copier_for", lambda layers, _: QueuedCopier(machine, layers))
    monkeypatch.setattr(mover_module, "make_pool", lambda *arguments: machine.tensor(made(*arguments)))
    monkeypatch.setattr(mover_module, "allocator", lambda half: PinnedMemory().allocate)
    monkeypatch.setattr(kept, "STAGED_BYTES", 1 << 16)
    worker.prepare()
    yield worker
    assert machine.used == {DEVICE}


def test_blocks_are_read_while_the_engine_goes_on(worker: Worker) -> None:
    read = []
    for seed in (1, 2):
        worker.compute(seed, [0, 1])
        found = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in worker.mover.forms.items()}
        read.append((seed, found, worker.mover.read([0, 1], found)))
    assert worker.machine.num_waits == 0
    for seed, found, moves in reversed(read):
        in_thread(moves.wait)
        assert all(torch.equal(tensor, expected) for tensor, expected in zip(found.values(), kv_of(seed), strict=True))


def test_blocks_are_written_without_waiting_and_files_stay_until_they_are_sent(worker: Worker) -> None:
    files = [dict(zip(worker.mover._pools, kv_of(seed), strict=True)) for seed in (1, 2, 3)]
    worker.mover.write([2, 3], files[0])
    worker.mover.write([5], files[1])
    assert worker.machine.num_waits == 0
    assert [file for _, file in worker.mover._sent] == files[:2]
    worker.machine.finish_all()
    for tensor, whole, half in zip(worker.blocks, kv_of(1), kv_of(2), strict=True):
        assert torch.equal(tensor[[2, 3]].flatten(0, 1), whole)
        assert torch.equal(tensor[5], half[BLOCK:])
    worker.mover.write([4], files[2])
    assert [file for _, file in worker.mover._sent] == files[2:]
