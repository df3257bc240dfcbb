# SPDX-License-Identifier: Apache-2.0
"""Loads, saves, reads and writes of a worker on a device whose streams run later, in any order that they may.

Pages hold a segment's values, and a segment's tag says which: what is loaded or read must be the tag's own.
"""

import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine_ext.core import worker as worker_module
from engine_ext.core.file_server import _pinned
from engine_ext.core.moves import Moves
from engine_ext.core.pages import WrongPagesError
from engine_ext.core.worker import WorkerHalf
from engine_ext.wire.plan import BlockTransfer, Span
from tests.support import workers
from tests.support.streams import DEVICE, Machine, QueuedCopier, in_thread
from tests.support.workers import HEADS, NAMES, SIZE, is_equal, make_half

PLACES = ((0, 1), (3, 2), (4, 5))
"""Pages of segments, of which two share all pages or none."""
TOKENS, PAGE_TOKENS, BLOCKS, BLOCK = 3, 2, 4, 16
STEPS = 12
WRONG_LOAD, WRONG_READ, OTHER_DEVICE = "wrong KV was loaded", "wrong KV was read", "another device was used"


def segment(tag: int) -> dict[str, Tensor]:
    """The KV of a tag."""
    return workers.segment(TOKENS, tag)


@contextmanager
def faked(machine: Machine, moves: type[Moves] = Moves) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "get_device_module", lambda device: machine)
        patch.setattr(worker_module, "Moves", moves)
        patch.setattr(worker_module, "copier_for", lambda layers, _: QueuedCopier(machine, layers))
        yield


def new_blocks(*, heads_first: bool) -> dict[str, Tensor]:
    """The engine's blocks by tensor, `[blocks, tokens, heads, size]`."""
    shape = (BLOCKS, HEADS, BLOCK, SIZE) if heads_first else (BLOCKS, BLOCK, HEADS, SIZE)
    return {name: torch.zeros(shape).transpose(1, 2) if heads_first else torch.zeros(shape) for name in NAMES}


def new_worker(machine: Machine, blocks: dict[str, Tensor]) -> WorkerHalf:
    """A worker, in the engine's thread."""
    machine.set_device(DEVICE)
    machine.set_stream(machine.Stream())
    return make_half(list(blocks.values()), 6, PAGE_TOKENS, torch.nan)


class History:
    """Random calls of a worker: the engine's from its thread, on a stream of its own; transfers from another thread.

    The engine may load and save wherever a transfer waits or queues something.
    """

    def __init__(self, source: random.Random, moves: type[Moves], *, heads_first: bool) -> None:
        self._source = source
        self._machine = Machine(source)
        self._moves = moves
        self._blocks = new_blocks(heads_first=heads_first)
        self._tags: dict[int, int | None] = dict.fromkeys(range(len(PLACES)))
        """The tag of each place, as an app would know it."""
        self._busy: int | None = None
        """The place that a transfer reads or writes."""
        self._is_writing = self._is_spoilt = False
        self._num_calls = 0
        self._problems: set[str] = set()

    def problems(self) -> set[str]:
        """Run the calls, and return the kinds of fault that were seen."""
        with (
            faked(self._machine, self._moves),
            ThreadPoolExecutor(1, "engine") as engine,
            ThreadPoolExecutor(1, "transfers") as transfers,
        ):
            self._half = engine.submit(new_worker, self._machine, self._blocks).result()
            self._machine.meanwhile = lambda: self._let(engine)
            for _ in range(STEPS):
                if self._source.random() < 0.5:
                    engine.submit(self._engines_call).result()
                else:
                    transfers.submit(self._source.choice((self._write, self._write, self._read))).result()
            self._machine.finish_all()
        if self._machine.used != {DEVICE}:
            self._problems.add(OTHER_DEVICE)
        return self._problems

    def _let(self, engine: ThreadPoolExecutor) -> None:
        """Lets the engine run, if a transfer asks."""
        if threading.current_thread().name.startswith("transfers") and self._source.random() < 0.3:
            engine.submit(self._engines_call).result()

    def _engines_call(self) -> None:
        place = self._source.randrange(len(PLACES))
        self._num_calls += 1
        block, tag = self._source.randrange(BLOCKS), self._tags[place]
        stream = self._machine.current_stream()
        blocks = {name: each[block, :TOKENS] for name, each in self._blocks.items()}
        if tag is None or self._source.random() < 0.4:
            if place == self._busy and not self._is_writing:
                return  # it is leased to whoever reads it
            tag = self._num_calls
            stream.queue(lambda: [blocks[name].copy_(each) for name, each in segment(tag).items()])
            self._half.save([self._transfer(place, tag, block)])
            if place == self._busy:  # an aborted fill's, which nobody loads
                self._is_spoilt = True
            else:
                self._tags[place] = tag
            return
        self._half.load([self._transfer(place, tag, block)])
        assert not self._half.take_refused_blocks()
        stream.queue(lambda: self._expect(tag, blocks, WRONG_LOAD))

    def _write(self) -> None:
        place = self._source.randrange(len(PLACES))
        self._num_calls += 1
        tag, tensors = self._num_calls, segment(self._num_calls)
        self._busy, self._is_writing, self._is_spoilt, self._tags[place] = place, True, False, None
        try:
            self._half.write(PLACES[place], tag, TOKENS, tensors)
        except WrongPagesError:
            assert self._is_spoilt
            self._tags[place] = None
        else:
            assert not self._is_spoilt
            self._tags[place] = tag
        for tensor in tensors.values():
            tensor.fill_(torch.nan)  # the next file is read into the same memory
        self._busy, self._is_writing = None, False

    def _read(self) -> None:
        place = self._source.randrange(len(PLACES))
        if (tag := self._tags[place]) is None:
            return
        self._busy = place
        tensors = {name: torch.empty(*form[0]) for name, form in self._half.forms(TOKENS).items()}
        self._half.read(PLACES[place], tag, tensors)
        self._expect(tag, tensors, WRONG_READ)
        self._busy = None

    def _transfer(self, place: int, tag: int, block: int) -> BlockTransfer:
        return BlockTransfer(f"r{self._num_calls}", (block,), 0, (Span(0, TOKENS, 0, tag, PLACES[place]),))

    def _expect(self, tag: int, found: dict[str, Tensor], problem: str) -> None:
        if not is_equal(found, segment(tag)):
            self._problems.add(problem)


@settings(max_examples=100, deadline=None)
@given(st.randoms(use_true_random=False), st.booleans())
def test_whatever_runs_when_a_tags_kv_is_loaded_and_read(source: random.Random, heads_first: bool) -> None:
    assert History(source, Moves, heads_first=heads_first).problems() == set()


class OfTheFirstDevice(Moves):
    """Threads of transfers have the device that every thread begins with, and wait for its stream."""

    def use_device(self) -> None:
        pass

    @contextmanager
    def apart(self) -> Iterator[None]:
        yield
        self._module.current_stream().synchronize()


class NeverFinishing(Moves):
    @contextmanager
    def apart(self) -> Iterator[None]:
        yield


class NeverWaiting(Moves):
    def wait(self) -> None:
        pass


@pytest.mark.parametrize(
    ("moves", "problems"),
    [
        (OfTheFirstDevice, {WRONG_LOAD, WRONG_READ, OTHER_DEVICE}),
        (NeverFinishing, {WRONG_LOAD, WRONG_READ}),
        (NeverWaiting, {WRONG_LOAD, WRONG_READ}),
    ],
)
def test_a_missing_wait_is_found(moves: type[Moves], problems: set[str]) -> None:
    found = set[str]()
    for seed in range(60):
        found |= History(random.Random(seed), moves, heads_first=bool(seed % 2)).problems()
    assert found == problems


@pytest.mark.parametrize("heads_first", [False, True])
def test_a_transfer_waits_for_the_engine_and_for_itself_however_many_layers_and_pages_it_has(heads_first: bool) -> None:
    machine = Machine(random.Random(0))
    with faked(machine):
        half = new_worker(machine, new_blocks(heads_first=heads_first))
        half.write([0, 3], 7, TOKENS, segment(7))
        assert machine.num_waits == 2
        tensors = {name: torch.empty(*form[0]) for name, form in half.forms(TOKENS).items()}
        half.read([0, 3], 7, tensors)
        assert machine.num_waits == 4
    assert is_equal(tensors, segment(7))


def test_memory_is_pinned_on_the_workers_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever thread does it."""
    machine = Machine(random.Random(0))
    monkeypatch.setattr(torch, "get_device_module", lambda device: machine)
    half = WorkerHalf(0, PAGE_TOKENS, BLOCK)
    half._moves = Moves(DEVICE)
    empty = torch.empty

    def pinned(size: int, *, dtype: torch.dtype, pin_memory: bool) -> Tensor:
        assert pin_memory
        machine.use(machine.current_device())
        return empty(size, dtype=dtype)

    monkeypatch.setattr(torch, "empty", pinned)
    assert len(in_thread(lambda: _pinned(half, 100))) == 100
    assert machine.used == {DEVICE}
