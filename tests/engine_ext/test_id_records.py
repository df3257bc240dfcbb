# SPDX-License-Identifier: Apache-2.0
"""Ids are written to the tiers, and found there by another process."""

import asyncio
import json
from typing import Any

import pytest
import torch

from cache.eviction.removal import Removal
from cache.manager import ChunkCacheManager
from cache.segments.chunk_ids import ChunkName, RegisteredText, UnknownIdError
from cache.segments.hashing import CacheScope, ChunkHash
from engine_ext.chunks.id_records import IdRecords
from engine_ext.chunks.transfers import TransferError
from engine_ext.wire.chunk_file import ChunkFileError
from engine_ext.wire.id_record import record_of, record_tensors
from replicas.document_keys import id_key
from tests.cache.helpers import Clock, fill, make_manager, tokens

TEXT = RegisteredText("A text.", "Title")
NAME = ChunkName("default", "a")


class FakeTransfers:
    """A tier, as the app sees it."""

    def __init__(self) -> None:
        self.records: dict[ChunkHash, bytes] = {}
        self.num_found = 0
        self.hangs: asyncio.Event | None = None

    async def keep_record(self, key: ChunkHash, data: bytes) -> None:
        if self.hangs is not None:
            await self.hangs.wait()
        self.records[key] = data

    async def find_record(self, key: ChunkHash) -> tuple[str | None, bytes]:
        self.num_found += 1
        return ("file", self.records[key]) if key in self.records else (None, b"")

    async def list_records(self) -> list[ChunkHash]:
        return list(self.records)

    async def drop(self, key: ChunkHash) -> None:
        self.records.pop(key, None)


class Process:
    """A server's manager with its records in a tier."""

    def __init__(self, tier: Any, *, is_kept: bool = True) -> None:
        self.clock = Clock()
        self.manager: ChunkCacheManager = make_manager(clock=self.clock, on_id=lambda name: self.records.changed(name))
        self.records = IdRecords(self.manager, lambda: tier, is_kept=is_kept)

    def register(self, name: ChunkName = NAME, expires_at: float | None = None) -> ChunkHash:
        fill(self.manager, tokens(100, 4), scope=CacheScope(name.namespace))
        entry = next(entry for entry in self.manager.index if not entry.is_system)
        self.manager.retain(entry, pinned=False, expires_at=expires_at)
        self.manager.ids.register(*name, TEXT, entry.key)
        return entry.key


@pytest.fixture
def tier() -> FakeTransfers:
    return FakeTransfers()


@pytest.fixture
def first(tier: FakeTransfers) -> Process:
    return Process(tier)


@pytest.fixture
def second(tier: FakeTransfers) -> Process:
    return Process(tier)


async def test_deletions_of_one_tenant_do_not_wait_for_the_records_of_another(tier, first):
    for number in range(50):
        first.register(ChunkName("busy", f"{number}"))
    first.register(ChunkName("mine", "a"))
    tier.hangs = asyncio.Event()
    background = asyncio.create_task(first.records.flush())
    await asyncio.sleep(0)
    written: list[int] = []

    async def delete() -> None:
        await first.records.flush("mine")
        written.append(len(tier.records))

    deletion = asyncio.create_task(delete())
    await asyncio.sleep(0)
    tier.hangs.set()
    await asyncio.gather(background, deletion)
    assert written[0] <= 3
    assert (len(tier.records), len(first.records)) == (51, 0)


@pytest.mark.parametrize(
    "wrong", [b"{}", b"[]", b"no json", b"[" * 100_000, b'{"id": "x", "namespace": "default", "text": ""}']
)
async def test_a_record_that_is_none_keeps_no_other_from_being_recalled(wrong, tier, first, second, caplog):
    tier.records[second.records._key(ChunkName("default", "x"))] = wrong
    first.register()
    await first.records.flush()
    await second.records._recall_all()
    assert second.manager.ids.content("default", "a") == TEXT
    assert "is none" in caplog.text


OF_ALL = [5, True, 0.5, [], [[]], {}, {"": ""}]
"""No field is any of these."""
WRONG: dict[str, list[Any]] = {
    "id": [*OF_ALL, None],
    "namespace": OF_ALL,
    "text": [*OF_ALL, None],
    "title": OF_ALL,
    "context": OF_ALL,
    "segments": [5, True, None, "", "aa", {}, {"": ""}, [[]], [None], ["aa"], [5], [{}]],
    "key": [*OF_ALL, None, "", "no hex", "aa", "aa" * 17],
    "adapter": [*OF_ALL, None],
    "prefix": [*OF_ALL, None, "no hex", "aa"],
    "tokens": [*OF_ALL, None, "", "no hex", "aa"],
    "created_at": [True, None, "", "5", [], [5], {}, float("nan"), float("inf")],
    "expires_at": [True, "", "5", [], [5], {}, float("nan"), float("inf")],
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in WRONG.items() for value in values])
async def test_a_record_with_a_field_of_another_type_is_ignored_with_one_line(
    field, value, tier, first, second, caplog
):
    """Whole, and for good: nothing of it is registered, it is not dropped as expired, and later ones are recalled."""
    first.register()
    later = ChunkName("default", "later")
    first.register(later)
    await first.records.flush()
    key = second.records._key(NAME)
    record = json.loads(tier.records[key])
    if field in record:
        record[field] = value
    else:
        record["segments"].append({**record["segments"][0], field: value})
    tier.records[key] = json.dumps(record).encode()
    before = dict(tier.records)
    await second.records._recall_all()
    assert [each.message.count("\n") for each in caplog.records] == [0]
    assert "is none" in caplog.text
    assert TEXT.text not in caplog.text
    await second.records.recall(*NAME[:1], [NAME.id])
    assert second.manager.ids.registration(NAME) is None
    assert second.manager.ids.content(*later) == TEXT
    await second.records.flush()
    assert tier.records == before
    second.manager.check_integrity()


async def test_of_many_wrong_segments_one_is_told(tier, first, second, caplog):
    """Without that, a list of all faults in a file of a few megabytes would take gigabytes."""
    first.register()
    await first.records.flush()
    key = second.records._key(NAME)
    tier.records[key] = json.dumps({**json.loads(tier.records[key]), "segments": [0] * 100_000}).encode()
    await second.records._recall_all()
    assert "segments: 0: " in caplog.text
    assert len(caplog.text) < 1000


@pytest.mark.parametrize(
    "tensors", [{}, {"other": torch.zeros(3, dtype=torch.uint8)}, {"record": torch.zeros(3, dtype=torch.bfloat16)}]
)
def test_a_file_without_a_record_is_told_from_one(tensors):
    with pytest.raises(ChunkFileError, match="no record"):
        record_of(tensors)
    assert record_of(record_tensors(b"data")) == b"data"


async def test_another_process_finds_an_id_with_its_segments(tier, first, second):
    key = first.register()
    assert len(first.records) == 1
    await first.records.flush()
    assert len(first.records) == 0
    await second.records.recall("default", ["a", "unknown"])
    assert second.manager.ids.content("default", "a") == TEXT
    (entry,) = second.manager.away
    original = first.manager.index.by_key(key)
    assert original is not None
    assert (entry.key, entry.identity, entry.tiers) == (key, original.identity, ("file",))
    assert second.manager.holdings.stored(id_key("default", "a")) is not None
    with pytest.raises(UnknownIdError):
        second.manager.ids.content("default", "unknown")
    found = tier.num_found
    await second.records.recall("default", ["a"])
    assert tier.num_found == found  # a known id is not looked for


async def test_an_id_is_looked_for_once_and_in_its_namespace(tier, second, first):
    await second.records.recall("default", ["unknown"] * 1000)
    assert tier.num_found == 1
    first.register()
    await first.records.flush()
    await second.records.recall("other", ["a"])
    with pytest.raises(UnknownIdError):
        second.manager.ids.content("other", "a")


async def test_a_start_reads_all_records_but_those_with_a_clients_salt(tier, first, second):
    first.register()
    salted = ChunkName("default\0secret", "b")
    first.register(salted)
    await first.records.flush()
    assert b"secret" not in b"".join(tier.records.values())
    running = asyncio.create_task(second.records.run())
    await asyncio.sleep(0.01)
    assert second.manager.ids.registration(NAME) is not None
    assert second.manager.ids.registration(salted) is None
    await second.records.recall(*salted[:1], ["b"])
    assert second.manager.ids.registration(salted) is not None
    running.cancel()


async def test_records_are_written_while_a_start_still_lists_them():
    class Slow(FakeTransfers):
        async def list_records(self) -> list[ChunkHash]:
            await asyncio.Event().wait()
            return []

    tier = Slow()
    process = Process(tier)
    running = asyncio.create_task(process.records.run())
    process.register()
    while not tier.records:
        await asyncio.sleep(0.01)
    running.cancel()


@pytest.mark.parametrize("hangs", [False, True])
async def test_what_is_dropped_for_good_leaves_no_record_and_is_not_found_meanwhile(hangs, tier, first):
    """Also if it is dropped while its record is being written."""
    tier.hangs = asyncio.Event()
    key = first.register()
    flushing = asyncio.create_task(first.records.flush())
    if not hangs:
        tier.hangs.set()
        await flushing
    await asyncio.sleep(0)
    entry = first.manager.index.by_key(key)
    assert entry is not None
    first.manager.detach(entry, Removal.DELETED)
    await first.records.recall("default", ["a"])  # its record is there still
    assert first.manager.ids.registration(NAME) is None
    tier.hangs.set()
    await flushing
    await first.records.flush()
    assert tier.records == {}


async def test_expired_segments_are_not_restored_and_their_record_goes(tier, first, second):
    first.register(expires_at=first.clock.now + 10)
    await first.records.flush()
    second.clock.now += 11
    await second.records.recall("default", ["a"])
    assert second.manager.ids.registration(NAME) is None
    await second.records.flush()
    assert tier.records == {}


async def test_a_tier_that_fails_or_ends_with_the_server_has_no_records(tier):
    process = Process(tier, is_kept=False)
    process.register()
    assert len(process.records) == 0
    await process.records.recall("default", ["b"])
    assert (tier.records, tier.num_found) == ({}, 0)

    class Failing:
        async def fail(self, *arguments: Any) -> None:
            raise TransferError("a worker has ended")

        keep_record = find_record = list_records = drop = fail

    process = Process(Failing())
    process.register()
    await process.records.flush()
    await process.records.recall("default", ["b"])
    assert len(process.records) == 0
