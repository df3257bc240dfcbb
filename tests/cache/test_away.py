# SPDX-License-Identifier: Apache-2.0
"""Segments that left the pool for a tier keep ids, documents and expiry, until they are dropped for good."""

import pytest

from cache.eviction.removal import Removal
from cache.manager import ChunkCacheManager
from cache.positions.layout import pack
from cache.segments import away
from cache.segments.chunk_ids import ChunkName, GoneIdError, RegisteredText
from cache.segments.hashing import ChunkHash
from cache.segments.holdings import DocumentKey, Tier
from cache.segments.index import ChunkKVCache, EntryState, SegmentIdentity
from tests.cache.helpers import SCOPE, Clock, acquire, fill, make_manager, tokens

A, B = tokens(100, 4), tokens(200, 6)
TEXT = RegisteredText("a text")
DOCUMENT = DocumentKey(b"d" * 16)


def stored(manager: ChunkCacheManager, *tiers: str) -> ChunkKVCache:
    """Chunk A in the pool and in tiers, registered as ``a``, and published."""
    fill(manager, A)
    entry = next(entry for entry in manager.index if not entry.is_system)
    entry.tiers = tiers
    manager.ids.register("default", "a", TEXT, entry.key)
    manager.name(DOCUMENT, entry)
    return entry


def test_what_a_tier_has_keeps_its_id_and_document():
    manager = make_manager()
    entry = stored(manager, "host", "file")
    manager.detach(entry, Removal.EVICTED)
    (left,) = manager.away
    assert (left.key, left.state, left.pages, left.tiers) == (entry.key, EntryState.STORED, [], ("host", "file"))
    assert manager.ids.content("default", "a") == TEXT
    assert manager.holdings.held(DOCUMENT).tier is Tier.HOST
    manager.check_integrity()


def test_what_no_tier_has_loses_them():
    manager = make_manager()
    manager.detach(stored(manager), Removal.EVICTED)
    with pytest.raises(GoneIdError, match="evicted"):
        manager.ids.content("default", "a")
    assert manager.holdings.held(DOCUMENT) is None
    assert not len(manager.away)


def test_a_segment_that_comes_back_is_in_the_pool_alone():
    manager = make_manager()
    manager.detach(stored(manager, "file"), Removal.ASLEEP)
    assert manager.holdings.held(DOCUMENT) is None
    assert manager.holdings.stored(DOCUMENT).tier is Tier.DISK
    fill(manager, A)
    assert not len(manager.away)
    assert manager.holdings.held(DOCUMENT).tier is Tier.DEVICE
    assert manager.ids.content("default", "a") == TEXT


def test_a_fill_that_fails_leaves_it_where_it_was():
    manager = make_manager()
    manager.detach(stored(manager, "file"), Removal.EVICTED)
    lease = acquire(manager, A)
    for job in lease.fills:
        manager.fill_failed(job)
    manager.release(lease)
    assert [entry.tiers for entry in manager.away] == [("file",)]
    assert manager.ids.content("default", "a") == TEXT


@pytest.mark.parametrize("is_away", [True, False])
@pytest.mark.parametrize("why", [Removal.DELETED, Removal.CLEARED, Removal.EXPIRED])
def test_dropped_for_good_it_is_gone_and_its_record_as_well(why: Removal, is_away: bool):
    changed: list[ChunkName] = []
    manager = make_manager(on_id=changed.append)
    entry = stored(manager, "file")
    if is_away:
        manager.detach(entry, Removal.EVICTED)
        (entry,) = manager.away
    assert changed == [("default", "a")]  # by registering it
    manager.detach(entry, why)
    assert changed == [("default", "a")] * 2
    assert not len(manager.away)
    with pytest.raises(GoneIdError, match=why):
        manager.ids.content("default", "a")


def test_clearing_a_namespace_clears_what_is_in_tiers():
    manager = make_manager()
    entry = stored(manager, "file")
    manager.detach(entry, Removal.EVICTED)
    assert entry.key not in manager.clear("other")
    assert entry.key in manager.clear("default")
    assert not len(manager.away)


def came_back(clock: Clock, expired: list[ChunkHash]) -> tuple[ChunkCacheManager, ChunkKVCache]:
    """Chunk A, to expire in ten seconds, after it was in a tier only; its earlier entry."""
    manager = make_manager(clock=clock, on_expired=expired.append)
    entry = stored(manager, "file")
    manager.retain(entry, pinned=False, expires_at=clock.now + 10)
    manager.detach(entry, Removal.EVICTED)
    fill(manager, A)
    return manager, entry


def test_it_expires_in_the_tier_and_after_it_came_back():
    clock, expired = Clock(), list[ChunkHash]()
    manager, entry = came_back(clock, expired)
    back = manager.index.by_key(entry.key)
    assert back.expires_at == clock.now + 10
    back.tiers = ("file",)
    manager.detach(back, Removal.EVICTED)
    clock.now += 11
    manager.expire()
    assert expired == [entry.key]
    with pytest.raises(GoneIdError, match="expired"):
        manager.ids.content("default", "a")


def test_an_entry_that_was_replaced_expires_without_effect():
    clock, expired = Clock(), list[ChunkHash]()
    manager, entry = came_back(clock, expired)
    manager.retain(manager.index.by_key(entry.key), pinned=False, expires_at=None)
    clock.now += 11
    manager.expire()
    assert expired == []
    assert manager.index.by_key(entry.key) is not None


def test_a_restored_segment_is_named_and_found_by_its_text():
    manager = make_manager()
    key = ChunkHash(b"k" * 16)
    identity = SegmentIdentity(SCOPE, pack((1, 2)), pack(B))
    entry = manager.away.restore(key, identity, ("file",), 10.0, None)
    manager.ids.restore(ChunkName("default", "b"), TEXT, key)
    assert manager.away.get(key) is entry
    assert manager.ids.ids(key) == ["b"]
    manager.ids.restore(ChunkName("default", "b"), RegisteredText("other"), ChunkHash(b"l" * 16))
    assert manager.ids.content("default", "b") == TEXT


def test_the_oldest_are_forgotten(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(away, "MOST_AWAY", 2)
    manager = make_manager()
    for number in range(3):
        identity = SegmentIdentity(SCOPE, b"", pack((number,)))
        manager.away.restore(ChunkHash(bytes([number]) * 16), identity, ("file",), 0.0, None)
    assert [entry.identity.token_ids for entry in manager.away] == [(1,), (2,)]
