# SPDX-License-Identifier: Apache-2.0
"""Acquiring, filling, releasing and detaching, one at a time; in any order: `test_manager_machine.py`."""

from contextlib import suppress

import pytest

from cache.errors import CapacityError, IntegrityError
from cache.eviction.quotas import Quota
from cache.lease import ChunkStatus
from cache.segments.hashing import CacheScope
from cache.segments.index import EntryState
from tests.cache.helpers import SYSTEM, ChunkCollidingHasher, CollidingHasher, acquire, fill, find, make_manager, tokens

A, B, C = tokens(100, 4), tokens(200, 6), tokens(300, 5)  # 1, 2 and 2 pages; the system segment takes 1
HIT, FILLED = ChunkStatus.HIT, ChunkStatus.FILLED


def test_tags_differ_between_fills_and_between_managers():
    leases = [acquire(make_manager(), A, B) for _ in range(2)]
    tags = [segment.entry.tag for lease in leases for segment in lease.segments]
    assert len(set(tags)) == 6
    assert all(0 <= tag < 2**63 for tag in tags)


def test_the_least_recently_used_chunks_go_first_and_whole():
    manager = make_manager(num_pages=6)
    for chunk in (A, B, C):  # 5 of 6 pages
        fill(manager, chunk, system=())
    fill(manager, A, system=())  # used again: B is now the oldest
    lease = acquire(manager, tokens(400, 8), system=())
    assert [entry.identity.token_ids for entry in manager.index] == [A, C, tokens(400, 8)]
    assert manager.occupancy()["pages_free"] == 1  # one of B's two pages was not needed and is free
    assert [segment.status for segment in lease.segments] == [FILLED]


def test_a_request_that_does_not_fit_is_no_use_of_what_it_found():
    manager = make_manager(num_pages=4)
    fill(manager, A, system=())
    fill(manager, B, system=())
    with pytest.raises(CapacityError, match="the chunks need 4 more pages of 4 tokens; 3 of 4 can be freed"):
        acquire(manager, A, tokens(500, 16), system=())
    acquire(manager, tokens(600, 5), system=())
    assert find(manager, A) is None  # still the least recently used
    assert find(manager, B) is not None


def test_a_chunk_longer_than_the_pool_is_named():
    manager = make_manager(num_pages=3)
    with pytest.raises(CapacityError, match="a segment of 13 tokens is longer than the chunk pool of 12 tokens"):
        acquire(manager, A, tokens(500, 13))
    assert acquire(manager, tokens(500, 12), system=()).fills


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda manager, a, b: manager.pool.allocate(1), "4 pages owned and 7 free of 12"),
        (lambda manager, a, b: manager.pool.free(b.pages[:1]), "4 pages owned and 9 free of 12"),
        (lambda manager, a, b: a.pages.__setitem__(0, b.pages[0]), "4 pages owned and 8 free of 12"),
        ({"leases": 1}, "but entries count"),
        ({"leases": -1}, "but entries count"),
        ({"state": EntryState.FILLING}, "fills are under way"),
        ({"state": EntryState.FAILED}, "an entry that was detached"),
        ({"detached": True}, "an entry that was detached"),
        ({"pinned": True}, "0 pages are pinned"),
    ],
)
def test_books_that_are_wrong_are_noticed(damage, message):
    manager = make_manager()
    fill(manager, A, B)
    manager.check_integrity()
    a, b = find(manager, A), find(manager, B)
    if isinstance(damage, dict):
        for name, value in damage.items():
            setattr(a, name, value)
    else:
        damage(manager, a, b)
    with pytest.raises(IntegrityError, match=message):
        manager.check_integrity()


class TestQuota:
    """Two pages for `small`; chunks of a page each."""

    SMALL = CacheScope("small\0salt")

    @pytest.fixture
    def quotas(self):
        return {"small": Quota(pages=2)}

    @pytest.fixture
    def manager(self, quotas):
        return make_manager(quota_of=lambda owner: quotas.get(owner, Quota()))

    def test_what_does_not_fit_it_at_all_is_not_cached(self, manager):
        fill(manager, A, system=(), scope=self.SMALL)
        with pytest.raises(CapacityError, match="more than what 'small' may have of the pool"):
            acquire(manager, tokens(300, 9), system=(), scope=self.SMALL)
        assert manager.usage.of("small") == (1, 1)

    def test_a_lowered_quota_holds_from_the_next_fill_on(self, manager, quotas):
        for first in (200, 300):
            fill(manager, tokens(first, 4), system=(), scope=self.SMALL)
        quotas["small"] = Quota(pages=1)
        fill(manager, tokens(400, 4), system=(), scope=self.SMALL)
        assert [entry.identity.token_ids for entry in manager.index] == [tokens(400, 4)]


class TestCollisions:
    """Hash collisions cause no wrong hit, and no page is lost or used twice."""

    @pytest.fixture
    def manager(self):
        return make_manager(hasher=CollidingHasher("engine"))

    @pytest.mark.parametrize(
        ("other", "status"),
        [
            ({}, HIT),
            ({"chunk": (4, 3)}, FILLED),
            ({"chunk": (3,)}, FILLED),
            ({"scope": CacheScope("tenant")}, FILLED),
            ({"scope": CacheScope(adapter="lora")}, FILLED),
            ({"system": (1, 2, 7)}, FILLED),
            ({"system": (1,), "chunk": (2, 3, 4)}, FILLED),
        ],
    )
    def test_other_content_of_an_equal_key_is_a_miss_that_displaces_the_older(self, other, status):
        manager = make_manager(hasher=ChunkCollidingHasher("engine"))
        first = {"chunk": (3, 4), "system": (1, 2), "scope": CacheScope()}
        for given in (first, {**first, **other}):
            lease = acquire(manager, given["chunk"], system=given["system"], scope=given["scope"])
            for job in lease.fills:
                manager.fill_succeeded(job)
            manager.release(lease)
        assert lease.chunks[0].status is status
        assert [entry for entry in manager.index if not entry.is_system] == [lease.chunks[0].entry]
        manager.check_integrity()

    def test_displacing_a_leased_entry_keeps_its_pages_until_it_is_released(self, manager):
        fill(manager, A, system=())
        held = acquire(manager, A, system=())
        other = acquire(manager, B, system=())
        old, new = held.chunks[0].entry, other.chunks[0].entry
        assert old.detached
        assert set(old.pages).isdisjoint(new.pages)
        assert set(old.pages).isdisjoint(manager.pool.free_pages())
        manager.check_integrity()
        manager.release(held)
        assert set(old.pages) <= manager.pool.free_pages()
        manager.check_integrity()

    @pytest.mark.parametrize("succeeds", [False, True])
    def test_displacing_an_entry_that_is_being_written_keeps_its_pages_until_the_fill_ended(self, manager, succeeds):
        held = acquire(manager, A, system=())
        fill(manager, B, system=())
        old = held.chunks[0].entry
        manager.release(held)
        assert set(old.pages).isdisjoint(manager.pool.free_pages())
        (manager.fill_succeeded if succeeds else manager.fill_failed)(held.fills[0])
        assert old.detached
        assert set(old.pages) <= manager.pool.free_pages()
        assert manager.is_idle
        assert [entry.identity.token_ids for entry in manager.index] == [B]
        manager.check_integrity()

    @pytest.mark.parametrize("cached", [(), (A,), (B,), (A, B)])
    def test_colliding_chunks_of_one_request_never_get_each_others_tokens(self, cached):
        """Refused (and run in full attention) or stored separately; no page is lost or used twice."""
        manager = make_manager(hasher=ChunkCollidingHasher("engine"))
        for chunk in cached:
            fill(manager, chunk)
        with suppress(CapacityError):
            lease = acquire(manager, A, B)
            assert [segment.entry.identity.token_ids for segment in lease.segments] == [SYSTEM, A, B]
            pages = [page for segment in lease.segments for page in segment.entry.pages]
            assert len(pages) == len(set(pages))
            assert manager.pool.free_pages().isdisjoint(pages)
        manager.check_integrity()
