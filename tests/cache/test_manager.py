# SPDX-License-Identifier: Apache-2.0
"""Acquiring, filling, releasing and detaching, one at a time."""

import pytest

from cache.errors import CapacityError, IntegrityError
from cache.eviction.quotas import Quota
from cache.eviction.removal import Removal
from cache.lease import ChunkStatus
from cache.manager import ChunkCacheManager
from cache.positions.layout import PositionStrategy
from cache.segments.hashing import CacheScope
from cache.segments.index import EntryState
from tests.cache.helpers import (
    PAGE_TOKENS,
    SCOPE,
    SYSTEM,
    Clock,
    acquire,
    fill,
    is_cached,
    make_manager,
    make_prompt,
    tokens,
)

A, B, C = tokens(100, 4), tokens(200, 6), tokens(300, 5)  # 1, 2 and 2 pages; the system segment takes 1
HIT, FILLED, WAITED = ChunkStatus.HIT, ChunkStatus.FILLED, ChunkStatus.WAITED


def state(manager: ChunkCacheManager) -> tuple:
    """All observable state, except the order of eviction."""
    entries = {(e.key, e.identity, tuple(e.pages), e.tag, e.state, e.detached, e.leases, e.hits) for e in manager.index}
    books = (manager.pool.free_pages(), manager.occupancy(), manager.metrics.snapshot(), manager.occupancy()["leases"])
    return entries, *books, manager.is_idle


def statuses(lease) -> list[ChunkStatus]:
    return [segment.status for segment in lease.segments]


def test_a_new_cache_is_idle_and_empty():
    manager = make_manager(num_pages=3)
    assert manager.is_idle
    assert manager.occupancy() == {
        "pages_total": 3,
        "pages_free": 3,
        "pages_leased": 0,
        "pages_pinned": 0,
        "page_tokens": PAGE_TOKENS,
        "segments": 0,
        "segments_filling": 0,
        "segments_detached": 0,
        "leases": 0,
    }
    manager.check_integrity()


def test_a_first_request_has_everything_filled_the_system_segment_by_the_first_job():
    manager = make_manager()
    lease = acquire(manager, A, B)
    assert statuses(lease) == [FILLED, FILLED, FILLED]
    assert [segment.entry.identity.token_ids for segment in lease.segments] == [SYSTEM, A, B]
    first, second = lease.fills
    assert first.entries == [lease.system.entry, lease.chunks[0].entry]
    assert (second.system, second.chunk) == (None, lease.chunks[1].entry)
    assert first.prompt_ids == [*SYSTEM, *A]
    assert second.prompt_ids == [*SYSTEM, *B]
    assert manager.metrics.lookups == {"filled": 2}
    assert manager.occupancy() | {"page_tokens": 0} == {
        "pages_total": 12,
        "pages_free": 8,
        "pages_leased": 4,
        "pages_pinned": 0,
        "page_tokens": 0,
        "segments": 3,
        "segments_filling": 3,
        "segments_detached": 0,
        "leases": 1,
    }


@pytest.mark.parametrize(
    ("strategy", "deltas"), [(PositionStrategy.SHARED, [4, 4, 4]), (PositionStrategy.OFFSET, [0, 0, 4])]
)
def test_segments_carry_the_placements_of_the_layout(strategy, deltas):
    lease = acquire(make_manager(), A, B, strategy=strategy)
    assert [segment.place.start for segment in lease.segments] == [0, 3, 7]
    assert [segment.place.delta for segment in lease.segments] == deltas


def test_while_a_fill_runs_others_wait_for_it_and_start_none():
    manager = make_manager()
    lease = acquire(manager, A)
    other = acquire(manager, A)
    assert statuses(other) == [WAITED, WAITED]
    assert other.fills == []
    assert [segment.entry for segment in other.segments] == [segment.entry for segment in lease.segments]
    assert manager.metrics.lookups == {"filled": 1, "waited": 1}


def test_once_filled_every_order_and_strategy_hits():
    manager = make_manager()
    fill(manager, A, B)
    lease = acquire(manager, B, A, strategy=PositionStrategy.OFFSET)
    assert statuses(lease) == [HIT, HIT, HIT]
    assert lease.fills == []
    assert manager.metrics.lookups == {"filled": 2, "hit": 2}
    assert manager.metrics.fills == {"succeeded": 2}


def test_a_chunk_given_twice_is_filled_once_and_leased_twice():
    manager = make_manager()
    lease = acquire(manager, A, B, A)
    assert [job.chunk.identity.token_ids for job in lease.fills] == [A, B]
    first, _, again = lease.chunks
    assert again.entry is first.entry
    assert first.entry.leases == 2
    assert statuses(lease)[1:] == [FILLED, FILLED, FILLED]
    assert again.place.start == first.place.start + len(A) + len(B)
    for job in lease.fills:
        manager.fill_succeeded(job)
    manager.release(lease)
    assert first.entry.leases == 0
    manager.check_integrity()


def test_a_missing_chunk_behind_a_present_system_segment_is_one_job_without_it():
    manager = make_manager()
    fill(manager, A)
    lease = acquire(manager, A, B)
    assert statuses(lease) == [HIT, HIT, FILLED]
    (job,) = lease.fills
    assert (job.system, job.chunk) == (None, lease.chunks[1].entry)


def test_a_missing_system_segment_alone_is_one_job():
    manager = make_manager()
    fill(manager, A)
    (system,) = [entry for entry in manager.index if entry.identity.token_ids == SYSTEM]
    manager.detach(system, Removal.DELETED)
    lease = acquire(manager, A)
    assert statuses(lease) == [FILLED, HIT]
    (job,) = lease.fills
    assert (job.system, job.chunk) == (lease.system.entry, None)
    assert job.prompt_ids == list(SYSTEM)


def test_an_empty_system_segment_is_not_cached():
    manager = make_manager()
    lease = acquire(manager, A, system=())
    assert lease.system is None
    assert lease.segments == lease.chunks
    (job,) = lease.fills
    assert (job.system, job.prompt_ids) == (None, list(A))
    assert manager.occupancy()["segments"] == 1


@pytest.mark.parametrize(
    "other",
    [
        {"scope": CacheScope("tenant")},
        {"scope": CacheScope(adapter="lora")},
        {"system": (1, 2)},
        {"system": ()},
    ],
)
def test_another_scope_or_system_never_hits(other):
    manager = make_manager()
    fill(manager, A)
    assert set(statuses(acquire(manager, A, **other))) == {FILLED}


def test_tags_differ_between_fills_and_between_managers():
    tags = []
    for manager in (make_manager(), make_manager()):
        lease = acquire(manager, A, B)
        tags += [segment.entry.tag for segment in lease.segments]
    assert len(set(tags)) == 6
    assert all(0 <= tag < 2**63 for tag in tags)


def test_a_job_is_wanted_while_somebody_holds_one_of_its_entries():
    manager = make_manager()
    lease = acquire(manager, A)
    (job,) = lease.fills
    other = acquire(manager, B)  # waits for the system segment only
    manager.release(lease)
    assert job.is_wanted
    manager.release(other)
    assert not job.is_wanted


def test_a_lease_ends_once():
    manager = make_manager()
    lease = acquire(manager, A)
    manager.release(lease)
    before = state(manager)
    with pytest.raises(KeyError):
        manager.release(lease)
    assert state(manager) == before


def test_the_least_recently_used_chunks_go_first_and_whole():
    manager = make_manager(num_pages=6)
    for chunk in (A, B, C):  # 5 of 6 pages
        fill(manager, chunk, system=())
    fill(manager, A, system=())  # used again: B is now the oldest
    lease = acquire(manager, tokens(400, 8), system=())
    assert not is_cached(manager, B)
    assert is_cached(manager, A)
    assert is_cached(manager, C)
    assert manager.metrics.removals == {"evicted": 1}
    assert manager.occupancy()["pages_free"] == 1  # one of B's two pages was not needed and is free
    assert statuses(lease) == [FILLED]


def test_no_more_is_evicted_than_needed():
    manager = make_manager(num_pages=4)
    for chunk in (A, B, tokens(500, 1)):
        fill(manager, chunk, system=())
    acquire(manager, tokens(600, 3), system=())
    assert [entry.identity.token_ids for entry in manager.index] == [B, tokens(500, 1), tokens(600, 3)]
    assert manager.metrics.removals == {"evicted": 1}


def test_what_the_request_itself_hits_is_not_evicted_for_it():
    manager = make_manager(num_pages=4)
    fill(manager, A, system=())
    fill(manager, B, system=())
    lease = acquire(manager, A, C, system=())
    assert statuses(lease) == [HIT, FILLED]
    assert not is_cached(manager, B)
    with pytest.raises(CapacityError, match="the chunks need 2 more pages of 4 tokens; 1 of 4 can be freed"):
        acquire(manager, B, system=())


def test_leased_and_unfinished_chunks_are_never_evicted():
    manager = make_manager(num_pages=4)
    fill(manager, A, system=())
    lease = acquire(manager, A, system=())
    unfinished = acquire(manager, B, system=())
    manager.release(unfinished)
    with pytest.raises(CapacityError, match="the chunks need 2 more pages of 4 tokens; 1 of 4 can be freed"):
        acquire(manager, C, system=())
    manager.release(lease)
    assert statuses(acquire(manager, C, system=())) == [FILLED]  # in A's page and the free page
    assert not is_cached(manager, A)
    assert is_cached(manager, B)


def test_pages_of_an_evicted_chunk_serve_the_next():
    manager = make_manager(num_pages=2)
    fill(manager, B, system=())
    lease = acquire(manager, C, system=())
    assert lease.chunks[0].entry.pages == [0, 1]
    assert statuses(lease) == [FILLED]


def test_a_request_that_does_not_fit_changes_nothing():
    manager = make_manager(num_pages=6)
    fill(manager, A)
    lease = acquire(manager, B)
    before = state(manager)
    with pytest.raises(CapacityError, match="the chunks need 4 more pages of 4 tokens; 3 of 6 can be freed"):
        acquire(manager, C, tokens(400, 7))
    assert state(manager) == before
    assert is_cached(manager, A)
    manager.check_integrity()
    manager.fill_succeeded(lease.fills[0])
    manager.release(lease)
    assert manager.is_idle


def test_a_request_that_does_not_fit_is_no_use_of_what_it_found():
    manager = make_manager(num_pages=4)
    fill(manager, A, system=())
    fill(manager, B, system=())
    with pytest.raises(CapacityError):
        acquire(manager, A, tokens(500, 16), system=())
    acquire(manager, tokens(600, 5), system=())
    assert not is_cached(manager, A)  # still the least recently used
    assert is_cached(manager, B)


def test_a_chunk_longer_than_the_pool_is_named():
    manager = make_manager(num_pages=3)
    with pytest.raises(CapacityError, match="a segment of 13 tokens is longer than the chunk pool of 12 tokens"):
        acquire(manager, A, tokens(500, 13))
    assert manager.is_idle
    assert acquire(manager, tokens(500, 12), system=()).fills


def test_detaching_a_written_entry_frees_its_pages_only_after_the_fill():
    manager = make_manager()
    lease = acquire(manager, B, system=())
    (job,), entry = lease.fills, lease.chunks[0].entry
    manager.release(lease)
    manager.detach(entry, Removal.DELETED)
    assert not is_cached(manager, B)
    assert manager.pool.num_free == 10
    assert not manager.is_idle
    assert statuses(acquire(manager, B, system=())) == [FILLED]  # again, in other pages
    assert manager.pool.num_free == 8
    manager.fill_failed(job, "aborted")
    assert manager.pool.num_free == 10
    assert manager.metrics.fills == {"aborted": 1}
    manager.check_integrity()


def test_a_fill_goes_on_for_those_who_wait_when_its_entry_is_detached():
    manager = make_manager()
    lease = acquire(manager, B, system=())
    entry = lease.chunks[0].entry
    manager.detach(entry, Removal.DELETED)
    manager.fill_succeeded(lease.fills[0])
    assert (entry.state, entry.detached) == (EntryState.READY, True)
    assert not is_cached(manager, B)
    assert manager.pool.num_free == 10  # still leased
    manager.release(lease)
    assert manager.pool.num_free == 12
    assert manager.is_idle


def test_detaching_a_leased_entry_frees_its_pages_with_the_last_lease():
    manager = make_manager()
    fill(manager, B, system=())
    one, other = acquire(manager, B, system=()), acquire(manager, B, system=())
    manager.detach(one.chunks[0].entry, Removal.DELETED)
    manager.detach(one.chunks[0].entry, Removal.DELETED)  # idempotent
    manager.release(one)
    assert manager.pool.num_free == 10
    assert not manager.is_idle
    manager.release(other)
    assert manager.pool.num_free == 12
    assert manager.is_idle


def test_a_failed_fill_drops_its_entries_and_the_next_request_fills_anew():
    manager = make_manager()
    lease = acquire(manager, A, B)
    waiting = acquire(manager, A)
    with_system, alone = lease.fills
    manager.fill_succeeded(alone)
    manager.fill_failed(with_system)
    assert [segment.entry.state for segment in waiting.segments] == [EntryState.FAILED] * 2
    for each in (lease, waiting):
        manager.release(each)
    assert manager.is_idle
    assert statuses(acquire(manager, A, B)) == [FILLED, FILLED, HIT]
    assert manager.metrics.fills == {"succeeded": 1, "failed": 1}


def test_the_cache_is_idle_when_no_lease_and_no_fill_is_left():
    manager = make_manager()
    lease = acquire(manager, A, system=())
    assert not manager.is_idle
    manager.release(lease)
    assert not manager.is_idle  # the fill goes on
    assert manager.occupancy()["leases"] == 0
    manager.fill_succeeded(lease.fills[0])
    assert manager.is_idle


def test_a_stolen_page_is_noticed():
    manager = make_manager()
    fill(manager, B)
    manager.check_integrity()
    (entry,) = [entry for entry in manager.index if entry.identity.token_ids == B]
    manager.pool.free(entry.pages)
    with pytest.raises(IntegrityError, match="3 pages owned and 11 free of 12"):
        manager.check_integrity()


def test_a_lost_page_is_noticed():
    manager = make_manager()
    manager.pool.allocate(1)
    with pytest.raises(IntegrityError, match="0 pages owned and 11 free of 12"):
        manager.check_integrity()


def test_a_page_with_two_owners_is_noticed():
    manager = make_manager()
    lease = acquire(manager, A, C, system=())
    one, other = (segment.entry for segment in lease.chunks)
    one.pages[0] = other.pages[0]
    with pytest.raises(IntegrityError, match="3 pages owned and 9 free of 12"):
        manager.check_integrity()


@pytest.mark.parametrize("change", [1, -1])
def test_a_wrong_count_of_leases_is_noticed(change):
    manager = make_manager()
    acquire(manager, A).chunks[0].entry.leases += change
    with pytest.raises(IntegrityError, match="but entries count"):
        manager.check_integrity()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"state": EntryState.FILLING}, "fills are under way"),
        ({"state": EntryState.FAILED}, "an entry that was detached"),
        ({"detached": True}, "an entry that was detached"),
        ({"pinned": True}, "0 pages are pinned"),
    ],
)
def test_an_impossible_state_in_the_index_is_noticed(fields, message):
    manager = make_manager()
    fill(manager, A)
    for name, value in fields.items():
        setattr(next(iter(manager.index)), name, value)
    with pytest.raises(IntegrityError, match=message):
        manager.check_integrity()


def test_a_chunk_of_scope_isolated_is_computed_behind_the_opening_and_the_system_segment_apart():
    manager = make_manager()
    lease = acquire(manager, A, opening=(7,))
    assert statuses(lease) == [FILLED, FILLED]
    assert [job.prompt_ids for job in lease.fills] == [list(SYSTEM), [7, *A]]
    for job in lease.fills:
        manager.fill_succeeded(job)
    manager.release(lease)
    assert statuses(acquire(manager, A, opening=(7,), system=tokens(500, 3))) == [FILLED, HIT]
    assert statuses(acquire(manager, A)) == [HIT, FILLED]  # scope "system": other preceding tokens


def test_an_opening_that_is_the_system_segment_shares_with_scope_system():
    manager = make_manager()
    fill(manager, A)
    assert statuses(acquire(manager, A, opening=SYSTEM)) == [HIT, HIT]


def test_a_pinned_chunk_stays_until_it_is_unpinned():
    manager = make_manager(num_pages=4)
    fill(manager, A, system=())
    fill(manager, B, system=())
    (entry,) = [entry for entry in manager.index if entry.identity.token_ids == A]
    manager.retain(entry, pinned=True, expires_at=None)
    with pytest.raises(CapacityError):
        acquire(manager, tokens(500, 16), system=())
    fill(manager, tokens(600, 12), system=())
    assert is_cached(manager, A)
    manager.retain(entry, pinned=False, expires_at=None)
    fill(manager, tokens(500, 16), system=())
    assert not is_cached(manager, A)


def test_no_more_than_a_share_of_the_pool_can_be_pinned():
    manager = make_manager(num_pages=4)  # three pages
    lease = acquire(manager, A, B, system=())
    one, other = (segment.entry for segment in lease.chunks)
    manager.retain(one, pinned=True, expires_at=None)
    manager.retain(one, pinned=True, expires_at=None)  # repeating changes nothing
    manager.retain(other, pinned=True, expires_at=None)
    more = acquire(manager, tokens(500, 1), system=())
    with pytest.raises(CapacityError, match="pinning 1 more pages would exceed 3 of 4 pages; 3 are pinned"):
        manager.retain(more.chunks[0].entry, pinned=True, expires_at=None)
    manager.check_integrity()


def test_what_has_expired_is_a_miss_unless_its_time_was_extended():
    clock = Clock()
    manager = make_manager(clock=clock)
    for chunk, ttl in ((A, 5.0), (B, 5.0)):
        fill(manager, chunk, system=())
        *_, entry = manager.index
        manager.retain(entry, pinned=True, expires_at=clock.now + ttl)
    manager.retain(entry, pinned=False, expires_at=clock.now + 9.0)
    clock.now += 5.0
    assert statuses(acquire(manager, A, B, system=())) == [FILLED, HIT]
    assert manager.metrics.removals == {"expired": 1}
    manager.check_integrity()


def test_clearing_one_namespace_leaves_the_others():
    manager = make_manager()
    fill(manager, A, system=())
    fill(manager, A, system=(), scope=CacheScope("tenant"))
    assert len(manager.clear("tenant")) == 1
    assert [entry.identity.scope.namespace for entry in manager.index] == ["default"]


def test_looking_up_changes_nothing():
    manager = make_manager()
    fill(manager, A)
    before = state(manager)
    found = manager.look_up(make_prompt(A, B), CacheScope())
    assert [wanted.entry is not None for wanted in found.segments] == [True, True, False]
    assert found.pages_needed == 2
    assert state(manager) == before


class TestQuota:
    """Two pages for `small` in a pool of twelve; chunks of a page each."""

    SMALL = CacheScope("small\0salt")

    @pytest.fixture
    def quotas(self):
        return {"small": Quota(pages=2)}

    @pytest.fixture
    def manager(self, quotas):
        return make_manager(12, quota_of=lambda owner: quotas.get(owner, Quota()))

    def fill(self, manager, first, scope):
        lease = acquire(manager, tokens(first, 4), system=(), scope=scope)
        for job in lease.fills:
            manager.fill_succeeded(job)
        manager.release(lease)
        return lease.chunks[0].entry

    def test_an_owner_makes_room_for_itself(self, manager):
        others = self.fill(manager, 100, SCOPE)
        own = [self.fill(manager, first, self.SMALL) for first in (200, 300, 400)]
        assert [entry.detached for entry in own] == [True, False, False]
        assert not others.detached
        assert manager.usage.of("small") == (2, 2)

    def test_what_does_not_fit_it_at_all_is_not_cached(self, manager):
        self.fill(manager, 200, self.SMALL)
        with pytest.raises(CapacityError, match="more than what 'small' may have of the pool"):
            acquire(manager, tokens(300, 9), system=(), scope=self.SMALL)
        assert manager.usage.of("small") == (1, 1)

    def test_what_is_in_use_counts_and_stays(self, manager):
        leases = [acquire(manager, tokens(first, 4), system=(), scope=self.SMALL) for first in (200, 300)]
        with pytest.raises(CapacityError):
            acquire(manager, tokens(400, 4), system=(), scope=self.SMALL)
        assert not any(lease.chunks[0].entry.detached for lease in leases)

    def test_others_have_the_whole_pool(self, manager):
        self.fill(manager, 200, self.SMALL)
        acquire(manager, tokens(300, 48), system=())
        assert manager.usage.of("small") == (0, 0)

    def test_a_number_of_segments(self, manager, quotas):
        quotas[SCOPE.owner] = Quota(segments=1)
        first, second = self.fill(manager, 200, SCOPE), self.fill(manager, 300, SCOPE)
        assert (first.detached, second.detached) == (True, False)

    def test_a_lowered_quota_holds_from_the_next_fill_on(self, manager, quotas):
        own = [self.fill(manager, first, self.SMALL) for first in (200, 300)]
        quotas["small"] = Quota(pages=1)
        newest = self.fill(manager, 400, self.SMALL)
        assert [entry.detached for entry in (*own, newest)] == [True, True, False]
