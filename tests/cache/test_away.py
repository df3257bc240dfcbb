# SPDX-License-Identifier: Apache-2.0
"""Segments that left the pool for a tier keep ids, documents and expiry, until they are dropped for good."""

import pytest

from cache.eviction.removal import Removal
from cache.positions.layout import pack
from cache.segments import away
from cache.segments.chunk_ids import ChunkName, GoneIdError, RegisteredText
from cache.segments.hashing import ChunkHash
from cache.segments.holdings import DocumentKey, Tier
from cache.segments.index import ChunkKVCache, EntryState, SegmentIdentity
from tests.cache.helpers import SCOPE, Clock, acquire, fill, find, make_manager, tokens

A, B = tokens(100, 4), tokens(200, 6)
TEXT = RegisteredText("a text")
DOCUMENT = DocumentKey(b"d" * 16)


class Cache:
    """A manager with chunk A in the pool, registered as ``a``, and published."""

    def __init__(self) -> None:
        self.clock, self.expired, self.changed = Clock(), list[ChunkHash](), list[ChunkName]()
        self.manager = make_manager(clock=self.clock, on_expired=self.expired.append, on_id=self.changed.append)
        fill(self.manager, A)
        self.entry = find(self.manager, A)
        self.manager.ids.register("default", "a", TEXT, self.entry.key)
        self.manager.name(DOCUMENT, self.entry)

    def leave(self, why: Removal = Removal.EVICTED, *tiers: str) -> None:
        """A leaves the pool for tiers."""
        entry = find(self.manager, A)
        entry.tiers = tiers or ("file",)
        self.manager.detach(entry, why)

    @property
    def away(self) -> list[ChunkKVCache]:
        return list(self.manager.away)

    def assert_gone(self, why: str) -> None:
        assert self.away == []
        with pytest.raises(GoneIdError, match=why):
            self.manager.ids.content("default", "a")


@pytest.fixture
def cache() -> Cache:
    return Cache()


def test_what_a_tier_has_keeps_its_id_and_document(cache):
    cache.leave(Removal.EVICTED, "host", "file")
    (left,) = cache.away
    assert (left.key, left.state, left.pages, left.tiers) == (cache.entry.key, EntryState.STORED, [], ("host", "file"))
    assert cache.manager.ids.content("default", "a") == TEXT
    assert cache.manager.holdings.held(DOCUMENT).tier is Tier.HOST
    cache.manager.check_integrity()


def test_what_no_tier_has_loses_them(cache):
    cache.manager.detach(cache.entry, Removal.EVICTED)
    cache.assert_gone("evicted")
    assert cache.manager.holdings.held(DOCUMENT) is None


def test_a_fill_that_fails_leaves_it_where_it_was_and_one_that_succeeds_in_the_pool_alone(cache):
    cache.leave(Removal.ASLEEP)
    assert cache.manager.holdings.held(DOCUMENT) is None
    assert cache.manager.holdings.stored(DOCUMENT).tier is Tier.DISK
    lease = acquire(cache.manager, A)
    for job in lease.fills:
        cache.manager.fill_failed(job)
    cache.manager.release(lease)
    assert [entry.tiers for entry in cache.away] == [("file",)]
    assert cache.manager.ids.content("default", "a") == TEXT
    fill(cache.manager, A)
    assert cache.away == []
    assert cache.manager.holdings.held(DOCUMENT).tier is Tier.DEVICE
    assert cache.manager.ids.content("default", "a") == TEXT


@pytest.mark.parametrize("is_away", [True, False])
@pytest.mark.parametrize("why", [Removal.DELETED, Removal.CLEARED, Removal.EXPIRED])
def test_dropped_for_good_it_is_gone_and_its_record_as_well(cache, why, is_away):
    if is_away:
        cache.leave()
    assert cache.changed == [("default", "a")]  # by registering it
    cache.manager.detach(cache.away[0] if is_away else cache.entry, why)
    assert cache.changed == [("default", "a")] * 2
    cache.assert_gone(why)


def test_clearing_a_namespace_clears_what_is_in_tiers(cache):
    cache.leave()
    assert cache.entry.key not in cache.manager.clear("other")
    assert cache.entry.key in cache.manager.clear("default")
    assert cache.away == []


def test_it_expires_in_the_tier_and_after_it_came_back(cache):
    cache.manager.retain(cache.entry, pinned=False, expires_at=cache.clock.now + 10)
    cache.leave()
    fill(cache.manager, A)
    assert find(cache.manager, A).expires_at == cache.clock.now + 10
    cache.leave()
    cache.clock.now += 11
    cache.manager.expire()
    assert cache.expired == [cache.entry.key]
    cache.assert_gone("expired")


def test_an_entry_that_was_replaced_expires_without_effect(cache):
    cache.manager.retain(cache.entry, pinned=False, expires_at=cache.clock.now + 10)
    cache.leave()
    fill(cache.manager, A)
    cache.manager.retain(find(cache.manager, A), pinned=False, expires_at=None)
    cache.clock.now += 11
    cache.manager.expire()
    assert cache.expired == []
    assert find(cache.manager, A) is not None


def test_a_restored_segment_is_named_and_found_by_its_text():
    manager, key = make_manager(), ChunkHash(b"k" * 16)
    entry = manager.away.restore(key, SegmentIdentity(SCOPE, pack((1, 2)), pack(B)), ("file",), 10.0, None)
    manager.ids.restore(ChunkName("default", "b"), TEXT, key)
    assert manager.away.get(key) is entry
    assert manager.ids.ids(key) == ["b"]
    manager.ids.restore(ChunkName("default", "b"), RegisteredText("other"), ChunkHash(b"l" * 16))
    assert manager.ids.content("default", "b") == TEXT


def test_the_oldest_are_forgotten(monkeypatch):
    monkeypatch.setattr(away, "MOST_AWAY", 2)
    manager = make_manager()
    for number in range(3):
        identity = SegmentIdentity(SCOPE, b"", pack((number,)))
        manager.away.restore(ChunkHash(bytes([number]) * 16), identity, ("file",), 0.0, None)
    assert [entry.identity.token_ids for entry in manager.away] == [(1,), (2,)]
