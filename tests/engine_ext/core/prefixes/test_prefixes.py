# SPDX-License-Identifier: Apache-2.0
"""Blocks of workers' engines in tiers: the scheduler's manager, sockets, files, and back to other blocks."""

import hashlib
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key

from cache.tiers.chain import TierChain
from cache.tiers.directory import DirectoryTier
from cache.tiers.memory import MemoryTier
from cache.tiers.tier import Address, TierError
from engine_ext.core.file_server import listen
from engine_ext.core.prefixes import block_files
from engine_ext.core.prefixes.block_files import BlockFiles, Engine
from engine_ext.core.prefixes.manager import TierOffloadingManager
from engine_ext.core.prefixes.mover import BlockMover
from engine_ext.core.prefixes.worker_links import WorkerLinks
from engine_ext.wire.chunk_file import BlankFile
from engine_ext.wire.prefix import PrefixTag, blocks_address, is_block, namespace_digest
from engine_ext.wire.worker_messages import CountBlocks, DropBlocks, StopBlocks
from tests.support.waiting import until
from tests.support.workers import HEADS, NAMES, SIZE, make_half

BLOCK, BLOCKS, WORKERS = 64, 24, 2
PER_FILE = 2
KEYS = [make_offload_key(hashlib.sha256(bytes([number])).digest(), 0) for number in range(6)]
TIER_S = 0.5


class Worker:
    """A worker's engine blocks, two layers of random K and V, and its block files."""

    def __init__(self, folder: Path, tier: Any, rank: int, fingerprint: str = "engine") -> None:
        self.blocks = [torch.randn(BLOCKS, BLOCK, HEADS, SIZE) for _ in NAMES]
        half = make_half(self.blocks, 2, 32)
        tier.timeout_s = TIER_S
        self.files = BlockFiles(BlockMover(half), TierChain([tier]), Engine(fingerprint, rank, WORKERS))
        listen(blocks_address(f"{folder}/{rank}"), self.files.answer)

    def kv(self, block_ids: list[int]) -> torch.Tensor:
        return torch.stack([blocks[block_ids] for blocks in self.blocks])


class Server:
    """All workers of one engine, and its scheduler's manager."""

    def __init__(self, folder: Path, tier: Any, fingerprint: str = "engine") -> None:
        folder.mkdir(exist_ok=True)
        self.workers = [Worker(folder, tier, rank, fingerprint) for rank in range(WORKERS)]
        self.manager = TierOffloadingManager(WorkerLinks(str(folder), WORKERS))
        self._count = 0

    def request(self, tag: PrefixTag | None) -> ReqContext:
        self._count += 1
        context = ReqContext(str(self._count), tag.to_params() if tag is not None else None)
        for number, key in enumerate(KEYS, 1):
            context.set_offload_key_position(key, number * PER_FILE * BLOCK)
        self.manager.on_new_request(context)
        return context

    def found(self, context: ReqContext, keys: list[Any] = KEYS) -> int:
        """The number of leading hits, as vLLM's scheduler counts them, in as many steps as it takes."""
        results = [LookupResult.RETRY]

        def has_ended() -> bool:
            results[:] = [self.manager.lookup(key, context) for key in keys]
            self.manager.on_schedule_end(None)  # type: ignore[arg-type]
            return LookupResult.RETRY not in results

        until(has_ended, 30)
        return [*results, LookupResult.MISS].index(LookupResult.MISS)

    def store(self, context: ReqContext, keys: list[Any], block_ids: list[int]) -> int:
        """Stores blocks; returns how many of the keys were new."""
        chosen = self.manager.prepare_store(keys, context)
        assert chosen is not None
        if chosen.keys_to_store:
            for worker in self.workers:
                worker.files.store(chosen.store_spec.namespace, chosen.store_spec.keys, block_ids)
            self.manager.complete_store(chosen.keys_to_store, context)
        self.settle()
        return len(chosen.keys_to_store)

    def load(self, context: ReqContext, keys: list[Any], block_ids: list[int]) -> None:
        spec = self.manager.prepare_load(keys, context)
        for worker in self.workers:
            worker.files.load(spec.name, spec.keys, block_ids)
        self.manager.complete_load(keys, context)

    def settle(self) -> None:
        """Waits until all files are written."""
        until(lambda: not any(worker.files.carried_out(CountBlocks()).count for worker in self.workers), 30)

    def num_staged(self) -> int:
        return sum(len(worker.files._staged) for worker in self.workers)


TAG = PrefixTag.of("default")
SIX = list(range(6))


@pytest.fixture
def tier(tmp_path: Path) -> DirectoryTier:
    return DirectoryTier(tmp_path / "tier", 1 << 30)


@pytest.fixture
def server(tmp_path: Path, tier: DirectoryTier) -> Server:
    return Server(tmp_path / "sockets", tier)


@pytest.mark.parametrize("num_there", [0, 1])
def test_blocks_come_back_bit_for_bit_in_another_server(num_there, server, tier, tmp_path):
    """Also if the first file's first block is in the engine already."""
    stored = [worker.kv(SIX) for worker in server.workers]
    assert server.store(server.request(TAG), KEYS[:3], SIX) == 3
    other, places = Server(tmp_path / "others", tier), [9, 4, 11, 20, 3, 7][num_there:]
    before = [worker.kv([9]) for worker in other.workers]
    context = other.request(TAG)
    assert other.found(context) == 3
    other.load(context, KEYS[:3], places)
    for worker, expected, untouched in zip(other.workers, stored, before, strict=True):
        assert torch.equal(worker.kv(places), expected[:, num_there:])
        assert torch.equal(worker.kv([9]), untouched) is bool(num_there)


@pytest.mark.parametrize(
    ("tag", "fingerprint"), [(None, "engine"), (PrefixTag.of("acme"), "engine"), (TAG, "another model")]
)
def test_others_find_nothing(tag, fingerprint, server, tier, tmp_path):
    server.store(server.request(TAG), KEYS, [*range(12)])
    other = Server(tmp_path / "others", tier, fingerprint)
    assert other.found(other.request(tag)) == 0
    assert server.found(server.request(TAG)) == 6


def test_nothing_without_a_tag_and_nothing_known_is_stored(server, tier):
    assert server.store(server.request(None), KEYS, SIX) == 0
    assert list(tier.list()) == []
    assert server.store(server.request(TAG), KEYS[:2], SIX) == 2
    assert server.store(server.request(TAG), KEYS[:3], SIX) == 1
    tier.shrink(0)
    assert server.found(server.request(TAG)) == 0  # and so they are known to be gone
    assert server.store(server.request(TAG), KEYS[:3], SIX) == 3


@pytest.mark.parametrize(("at_least", "expected"), [(2 * PER_FILE * BLOCK, 2), (2 * PER_FILE * BLOCK + 1, 0)])
def test_a_composition_is_found_whole_or_not_at_all(at_least, expected, server):
    server.store(server.request(TAG), KEYS[:2], SIX)
    assert server.found(server.request(PrefixTag.of("default", at_least))) == expected


def test_files_that_are_damaged_or_of_one_worker_alone_are_missing(server, tier):
    server.store(server.request(TAG), KEYS[:3], SIX)
    tier.delete([min(stored.address for stored in tier.list() if stored.address.part == 1)])
    assert server.found(server.request(TAG)) < 3
    server.store(server.request(TAG), KEYS[:3], SIX)
    for stored in list(tier.list()):
        path = tier.path(stored.address)
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    assert server.found(server.request(TAG)) == 0
    events = server.workers[0].files.carried_out(CountBlocks()).events
    assert ("file", "corrupt") in events


def test_a_namespace_is_dropped_from_files(server, tier):
    acme = PrefixTag.of("acme")
    chunk = Address("ab" * 16, 0, WORKERS)
    tier.put(chunk, b"a chunk")
    server.store(server.request(TAG), KEYS[:3], SIX)
    server.store(server.request(acme), KEYS[:2], SIX)
    for worker in server.workers:
        worker.files.carried_out(DropBlocks(namespace_digest("acme")))
    assert server.found(server.request(acme)) == 0
    assert server.found(server.request(TAG)) == 3
    for worker in server.workers:
        worker.files.carried_out(DropBlocks())
    assert [stored.address for stored in tier.list()] == [chunk]
    assert not is_block(chunk.key)


def test_what_waits_is_dropped_too(tmp_path):
    hold, tier = threading.Event(), MemoryTier(1 << 30)
    put = tier.put

    def slow(*arguments: Any) -> None:
        hold.wait(30)
        put(*arguments)

    tier.put = slow  # type: ignore[method-assign]
    server = Server(tmp_path / "sockets", tier)
    for worker in server.workers:
        worker.files.store(namespace_digest("default"), [key.hex() for key in KEYS[:3]], SIX)
    dropping = threading.Thread(target=server.workers[0].files.carried_out, args=(DropBlocks(),))
    dropping.start()
    hold.set()
    dropping.join(30)
    server.settle()
    assert {stored.address.part for stored in tier.list()} == {1}


def test_what_is_being_written_is_dropped_too(tmp_path, monkeypatch):
    begun, hold, tier, seal = threading.Event(), threading.Event(), MemoryTier(1 << 30), BlankFile.seal

    def held(file: BlankFile) -> memoryview:
        begun.set()
        hold.wait(30)
        return seal(file)

    monkeypatch.setattr(BlankFile, "seal", held)
    server = Server(tmp_path / "sockets", tier)
    files = server.workers[0].files
    files.store(namespace_digest("default"), [KEYS[0].hex()], SIX)
    assert begun.wait(30)
    dropping = threading.Thread(target=files.carried_out, args=(DropBlocks(),))
    dropping.start()
    dropping.join(0.2)  # without waiting for the write, it would find nothing to drop yet
    hold.set()
    dropping.join(30)
    server.settle()
    assert list(tier.list()) == []


def test_a_failing_tier_is_a_miss(tmp_path):
    class Failing(MemoryTier):
        def get(self, address: Address, max_bytes: int) -> Any:
            raise TierError("broken")

    server = Server(tmp_path / "sockets", Failing(1 << 30))
    server.store(server.request(TAG), KEYS[:3], SIX)
    assert server.found(server.request(TAG)) == 0


def test_a_slow_tier_gives_the_beginning(tmp_path):
    """The files that are read within the time limit."""

    class Slow(MemoryTier):
        def get(self, address: Address, max_bytes: int) -> Any:
            time.sleep(0.2)
            return super().get(address, max_bytes)

    server = Server(tmp_path / "sockets", Slow(1 << 30))
    server.store(server.request(TAG), KEYS, [*range(12)])
    assert 0 < server.found(server.request(TAG)) < 6


def test_staged_files_are_forgotten_and_an_aborted_requests_load_goes_on(server):
    server.store(server.request(TAG), KEYS[:3], SIX)
    loaded, aborted, unused = (server.request(TAG) for _ in range(3))
    for context in (loaded, aborted, unused):
        assert server.found(context) == 3
    server.load(loaded, KEYS[:3], SIX)
    assert server.found(loaded) == 3  # after a preemption
    for context in (loaded, aborted, unused):
        server.manager.on_request_finished(context)
    until(lambda: not server.num_staged(), 30)
    server.store(server.request(TAG), KEYS[:3], SIX)
    context = server.request(TAG)
    assert server.found(context) == 3
    spec = server.manager.prepare_load(KEYS[:3], context)
    server.manager.on_request_finished(context)
    time.sleep(0.1)
    for worker in server.workers:
        worker.files.load(spec.name, spec.keys, SIX)
    server.manager.complete_load(KEYS[:3], context)


def test_memory_is_bounded(server, monkeypatch):
    server.store(server.request(TAG), KEYS, [*range(12)])
    size = server.workers[0].files._mover.num_bytes
    monkeypatch.setattr(block_files, "MOST_STAGED_BYTES", 4 * size)
    assert server.found(server.request(TAG)) == 4
    assert server.found(server.request(TAG)) == 0


def test_nothing_is_read_nor_written_after_a_stop(server, tier):
    server.store(server.request(TAG), KEYS[:3], SIX)
    for worker in server.workers:
        worker.files.carried_out(StopBlocks())
    assert server.found(server.request(TAG)) == 0
    before = len(list(tier.list()))
    server.store(server.request(TAG), KEYS, [*range(12)])
    assert len(list(tier.list())) == before


def test_without_workers_nothing_is_found(tmp_path):
    server = Server(tmp_path / "sockets", MemoryTier(1 << 20))
    server.manager = TierOffloadingManager(WorkerLinks(str(tmp_path / "nowhere"), 1))
    assert server.found(server.request(TAG)) == 0
