# SPDX-License-Identifier: Apache-2.0
"""Blocks to and from files on a device, which the engine's thread doesn't wait for."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cache.tiers import kept
from engine_ext.core import worker as worker_module
from engine_ext.core.prefixes import mover as mover_module
from engine_ext.core.prefixes.mover import BlockMover
from kernels.paged import make_pool
from tests.support.streams import DEVICE, Machine, QueuedCopier, in_thread
from tests.support.tier_files import PinnedMemory
from tests.support.workers import HEADS, NAMES, SIZE, is_equal, make_half, segment

BLOCK, BLOCKS = 64, 8


class Worker:
    """A worker's blocks and mover, on a device that runs nothing by itself."""

    def __init__(self) -> None:
        never: Any = SimpleNamespace(choice=lambda options: options[0])
        self.machine = Machine(never)
        self.blocks = [torch.zeros(BLOCKS, BLOCK, HEADS, SIZE) for _ in NAMES]

    def prepare(self) -> None:
        self.machine.set_device(DEVICE)
        self.machine.set_stream(self.machine.Stream())
        self.mover = BlockMover(make_half(self.blocks, 2, 32))

    def compute(self, seed: int, block_ids: list[int]) -> None:
        """The engine computes blocks, which it queues."""
        kv = segment(2 * BLOCK, seed)

        def write() -> None:
            for tensor, layer in zip(self.blocks, kv.values(), strict=True):
                tensor[block_ids] = layer.view(len(block_ids), BLOCK, HEADS, SIZE)

        self.machine.current_stream().queue(write)


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
        assert is_equal(found, segment(2 * BLOCK, seed))


def test_blocks_are_written_without_waiting_and_files_stay_until_they_are_sent(worker: Worker) -> None:
    files = [segment(2 * BLOCK, seed) for seed in (1, 2, 3)]
    worker.mover.write([2, 3], files[0])
    worker.mover.write([5], files[1])
    assert worker.machine.num_waits == 0
    assert [file for _, file in worker.mover._sent] == files[:2]
    worker.machine.finish_all()
    for tensor, whole, half in zip(worker.blocks, segment(2 * BLOCK, 1).values(), files[1].values(), strict=True):
        assert torch.equal(tensor[[2, 3]].flatten(0, 1), whole)
        assert torch.equal(tensor[5], half[BLOCK:])
    worker.mover.write([4], files[2])
    assert [file for _, file in worker.mover._sent] == files[2:]
