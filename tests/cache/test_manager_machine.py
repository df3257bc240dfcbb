# SPDX-License-Identifier: Apache-2.0
"""The manager against a simple model, in any order of calls.

``STATE_MACHINE_EXAMPLES=2000 pytest tests/cache/test_manager_machine.py`` runs ten times as long.
"""

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import get_args

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from cache.errors import CapacityError
from cache.eviction.policies import EvictionPolicyName
from cache.eviction.quotas import Quota
from cache.eviction.removal import Removal
from cache.lease import ChunkStatus, FillJob, Lease
from cache.positions.layout import Place, PositionReindexer, PositionStrategy, pack
from cache.segments.chunk_ids import GoneIdError, IdConflictError, RegisteredText
from cache.segments.hashing import CacheScope
from cache.segments.index import ChunkKVCache, EntryState, SegmentIdentity
from tests.cache.helpers import PAGE_TOKENS, Clock, make_manager, make_prompt, tokens

EXAMPLES = int(os.environ.get("STATE_MACHINE_EXAMPLES", "200"))
STEPS = 50
NUM_PAGES = 12
PIN_LIMIT = 10
SYSTEMS = [(), tokens(100, 3), tokens(200, 6)]
OPENINGS = [None, (), tokens(100, 3), tokens(900, 2)]
CHUNKS = [tokens(300, 1), tokens(400, 4), tokens(500, 5), tokens(600, 9), tokens(700, 12), tokens(800, 17)]
SCOPES = [CacheScope("one"), CacheScope("one", "lora"), CacheScope("two"), CacheScope("two\0salt")]
QUOTAS = {"two": Quota(pages=8, segments=5)}
# This flag distinguishes a system segment from a chunk without a system segment.
Name = tuple[bool, SegmentIdentity]
picks = st.integers(0, 999)


@dataclass(eq=False)
class Known:
    """The model's state of one entry."""

    entry: ChunkKVCache
    state: EntryState = EntryState.FILLING
    leases: int = 0
    pinned: bool = False
    expires_at: float | None = None

    @property
    def pages(self) -> int:
        return len(self.entry.pages)


class Books(RuleBasedStateMachine):
    """``cached`` maps findable entries; ``gone`` has detached entries in use."""

    policy: EvictionPolicyName = "lru"
    steps = 0

    def __init__(self):
        super().__init__()
        self.clock = Clock()
        self.manager = make_manager(
            NUM_PAGES, clock=self.clock, eviction=self.policy, quota_of=lambda owner: QUOTAS.get(owner, Quota())
        )
        self.cached: dict[Name, Known] = {}
        self.gone: list[Known] = []
        self.leases: list[Lease] = []
        self.jobs: list[FillJob] = []
        self.ids: dict[str, tuple[RegisteredText, set[Name]]] = {}
        self.lookups: Counter[str] = Counter()
        self.fills: Counter[str] = Counter()
        self.removals: Counter[str] = Counter()

    @rule(
        system=st.sampled_from(SYSTEMS),
        opening=st.sampled_from(OPENINGS),
        chunks=st.lists(st.sampled_from(CHUNKS), min_size=1, max_size=4),
        scope=st.sampled_from(SCOPES),
        strategy=st.sampled_from(PositionStrategy),
    )
    def acquire(self, system, opening, chunks, scope, strategy):
        prompt = make_prompt(*chunks, system=system, opening=opening)
        layout = PositionReindexer().layout(prompt, strategy)
        self._expired()
        wanted = [(True, SegmentIdentity(scope, b"", pack(system)))] if system else []
        wanted += [(False, SegmentIdentity(scope, pack(prompt.chunk_prefix), pack(chunk))) for chunk in chunks]
        missing = [name for name in dict.fromkeys(wanted) if name not in self.cached]
        room = Room(self, scope.owner, missing, spared=wanted)
        found = self.manager.look_up(prompt, scope)
        assert found.pages_needed == room.needed
        sparing = {self.cached[name].entry for name in wanted if name in self.cached}
        assert self.manager._books.available_pages(sparing) == room.free + pages_in(room.evictable)
        if not room.suffices:
            with pytest.raises(CapacityError):  # the invariants check that nothing changed
                self.manager.fit(found, scope.owner)
            return

        lease = self.manager.lease(self.manager.fit(found, scope.owner), layout)
        taken = self._evicted(room)
        statuses = []
        for name, segment in zip(wanted, lease.segments, strict=True):
            known = self.cached.get(name)
            statuses.append(status_of(known, is_new=name in missing))
            if known is None:
                known = self.cached[name] = self._created(name, segment.entry, taken)
            known.leases += 1
            assert segment.entry is known.entry
        assert [segment.status for segment in lease.segments] == statuses
        assert [segment.place for segment in lease.segments] == [*[layout.system] * bool(system), *layout.chunks]
        assert (lease.system is None) == (not system)
        self.lookups.update(statuses[len(wanted) - len(chunks) :])
        self._check_jobs(lease, missing)
        self.leases.append(lease)
        self.jobs += lease.fills

    @rule(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=3), scope=st.sampled_from(SCOPES))
    def borrow(self, lengths, scope):
        identities = [SegmentIdentity(scope, pack((7,)), pack(tokens(900, length))) for length in lengths]
        names = [(False, identity) for identity in identities]
        places = [Place(1, length, 1, 0) for length in lengths]
        room = Room(self, scope.owner, names)
        if not room.suffices:
            with pytest.raises(CapacityError):
                self.manager.borrow(identities, places)
            return
        lease = self.manager.borrow(identities, places)
        taken = self._evicted(room)
        for name, segment, place in zip(names, lease.segments, places, strict=True):
            known = self._created(name, segment.entry, taken)
            known.leases = 1
            self.gone.append(known)  # never findable
            assert (segment.place, segment.status) == (place, ChunkStatus.FILLED)
        assert [job.entries for job in lease.fills] == [[segment.entry] for segment in lease.segments]
        self.leases.append(lease)
        self.jobs += lease.fills

    @precondition(lambda self: self.leases)
    @rule(pick=picks)
    def release(self, pick):
        lease = self.leases.pop(pick % len(self.leases))
        self.manager.release(lease)
        for segment in lease.segments:
            self._find(segment.entry).leases -= 1
        with pytest.raises(KeyError):
            self.manager.release(lease)

    @precondition(lambda self: self.jobs)
    @rule(pick=picks)
    def fill_succeeds(self, pick):
        job = self.jobs.pop(pick % len(self.jobs))
        assert job.is_wanted == any(self._find(entry).leases for entry in job.entries)
        self.manager.fill_succeeded(job)
        self.fills["succeeded"] += 1
        for entry in job.entries:
            self._find(entry).state = EntryState.READY

    @precondition(lambda self: self.jobs)
    @rule(pick=picks, outcome=st.sampled_from(["failed", "aborted"]))
    def fill_fails(self, pick, outcome):
        job = self.jobs.pop(pick % len(self.jobs))
        self.manager.fill_failed(job, outcome)
        self.fills[outcome] += 1
        for entry in job.entries:
            self._find(entry).state = EntryState.FAILED
            self._detached(entry, Removal.FILL_FAILED)

    @precondition(lambda self: self.cached or self.gone)
    @rule(pick=picks, why=st.sampled_from([Removal.DELETED, Removal.REFUSED]))
    def detach(self, pick, why):
        entry = self._pick(pick, self._known()).entry
        self.manager.detach(entry, why)
        self._detached(entry, why)

    @rule(namespace=st.sampled_from([None, "one"]))
    def clear(self, namespace):
        cleared = [k for name, k in self.cached.items() if namespace in (None, name[1].scope.namespace)]
        assert len(self.manager.clear(namespace)) == len(cleared)
        for known in cleared:
            self._detached(known.entry, Removal.CLEARED)

    @precondition(lambda self: self.cached)
    @rule(pick=picks, pinned=st.booleans(), ttl=st.sampled_from([None, 1.0, 3.0]))
    def retain(self, pick, pinned, ttl):
        known = self._pick(pick, list(self.cached.values()))
        expires_at = None if ttl is None else self.clock.now + ttl
        others = pages_in(other for other in self.cached.values() if other.pinned and other is not known)
        if pinned and not known.pinned and others + known.pages > PIN_LIMIT:
            with pytest.raises(CapacityError):
                self.manager.retain(known.entry, pinned=True, expires_at=expires_at)
            return
        self.manager.retain(known.entry, pinned=pinned, expires_at=expires_at)
        known.pinned, known.expires_at = pinned, expires_at

    @rule(seconds=st.sampled_from([0.5, 1.0, 2.5]))
    def time_passes(self, seconds):
        self.clock.now += seconds
        self.manager.expire()
        self._expired()

    @precondition(lambda self: self.cached)
    @rule(pick=picks, id=st.sampled_from("ab"), text=st.sampled_from(["x", "y"]))
    def register(self, pick, id, text):
        name = self._pick(pick, list(self.cached))
        content = RegisteredText(text)
        known = self.ids.get(id)
        if known is not None and known[0] != content:
            with pytest.raises(IdConflictError):
                self.manager.ids.register("one", id, content, self.cached[name].entry.key)
            return
        self.manager.ids.register("one", id, content, self.cached[name].entry.key)
        self.ids.setdefault(id, (content, set()))[1].add(name)

    @invariant()
    def books_balance(self):
        type(self).steps += 1
        self._forget_freed()
        self.manager.check_integrity()
        owned = [page for known in self._known() for page in known.entry.pages]
        assert len(owned) == len(set(owned))
        assert self.manager.pool.free_pages() == set(range(NUM_PAGES)) - set(owned)

    @invariant()
    def the_index_is_as_modelled(self):
        assert set(self.manager.index) == {known.entry for known in self.cached.values()}
        for known in self._known():
            entry = known.entry
            assert (entry.leases, entry.state, entry.detached) == (known.leases, known.state, known in self.gone)
        for known in self.cached.values():
            assert (known.entry.pinned, known.entry.expires_at) == (known.pinned, known.expires_at)

    @invariant()
    def ids_last_as_long_as_a_segment_of_theirs(self):
        assert len(self.manager.ids) == len(self.ids)
        for id, (content, _) in self.ids.items():
            assert self.manager.ids.content("one", id) == content

    @invariant()
    def counters_add_up(self):
        assert self.manager.occupancy() == {
            "pages_total": NUM_PAGES,
            "pages_free": NUM_PAGES - pages_in(self._known()),
            "pages_leased": pages_in(known for known in self.cached.values() if known.leases),
            "pages_pinned": pages_in(known for known in self.cached.values() if known.pinned),
            "page_tokens": PAGE_TOKENS,
            "segments": len(self.cached),
            "segments_filling": sum(len(job.entries) for job in self.jobs),
            "segments_detached": len(self.gone),
            "leases": len(self.leases),
        }
        metrics = self.manager.metrics
        assert (metrics.lookups, metrics.fills, metrics.removals) == (self.lookups, self.fills, self.removals)
        assert self.manager.is_idle == (not self.leases and not self.jobs)

    def teardown(self):
        """Nothing is left after the last release."""
        for job in self.jobs:
            self.manager.fill_succeeded(job)
        for lease in self.leases:
            self.manager.release(lease)
        assert self.manager.is_idle
        self.manager.clear()
        assert self.manager.pool.num_free == NUM_PAGES
        self.manager.check_integrity()

    def _evicted(self, room: "Room") -> set[int]:
        """Checks which entries were evicted, and records it; returns the pages that entries still have."""
        room.check_victims()
        for known in room.evictable:
            if known.entry.detached:
                self._detached(known.entry, Removal.EVICTED)
        self._forget_freed()
        return {page for known in self._known() for page in known.entry.pages}

    def _known(self) -> list[Known]:
        return [*self.cached.values(), *self.gone]

    def _find(self, entry: ChunkKVCache) -> Known:
        (known,) = [known for known in self._known() if known.entry is entry]
        return known

    def _forget_freed(self) -> None:
        self.gone = [known for known in self.gone if known.leases or known.state is EntryState.FILLING]

    def _pick(self, pick: int, among: list):
        return among[pick % len(among)]

    def _created(self, name: Name, entry: ChunkKVCache, taken: set[int]) -> Known:
        assert entry.identity == name[1]
        assert entry.is_system == name[0]
        assert len(entry.pages) == pages_of(name)
        assert taken.isdisjoint(entry.pages)
        taken.update(entry.pages)
        return Known(entry)

    def _expired(self) -> None:
        for known in list(self.cached.values()):
            if known.expires_at is not None and known.expires_at <= self.clock.now:
                self._detached(known.entry, Removal.EXPIRED)

    def _detached(self, entry: ChunkKVCache, why: Removal) -> None:
        for name, known in list(self.cached.items()):
            if known.entry is entry:
                known = self.cached.pop(name)
                known.pinned = False
                self.gone.append(known)
                self.removals[why] += 1
                self._unregister(name, why)

    def _unregister(self, name: Name, why: Removal) -> None:
        for id, (_, names) in list(self.ids.items()):
            names.discard(name)
            if not names:
                del self.ids[id]
                with pytest.raises(GoneIdError, match=why):
                    self.manager.ids.content("one", id)

    def _check_jobs(self, lease: Lease, missing: list[Name]) -> None:
        """A job per missing chunk; the system segment comes with the first chunk behind it, or alone."""
        created = [self.cached[name].entry for name in missing]
        chunks = [self.cached[name].entry for name in missing if not name[0]]
        systems = [self.cached[name].entry for name in missing if name[0]]
        assert sorted(entry.tag for job in lease.fills for entry in job.entries) == sorted(e.tag for e in created)
        behind = [c for c in chunks if systems and c.identity.prefix == systems[0].identity.tokens]
        assert len(lease.fills) == len(chunks) + (bool(systems) and not behind)
        for job in lease.fills:
            identity = job.entries[-1].identity
            assert job.prompt_ids == [*identity.prefix_ids, *identity.token_ids]
            assert job.system is None or job.chunk is None or job.chunk in behind


class Room:
    """Entries that may be evicted for an owner's ``missing`` segments; ``spared`` ones may not."""

    def __init__(self, books: Books, owner: str, missing: list[Name], spared: Sequence[Name] = ()) -> None:
        self.needed = sum(map(pages_of, missing))
        self.free = NUM_PAGES - pages_in(books._known())
        self.evictable = [
            known
            for name, known in books.cached.items()
            if known.state is EntryState.READY and not known.leases and not known.pinned and name not in spared
        ]
        self.own = [known for known in self.evictable if known.entry.owner == owner]
        self.surplus_pages = self.surplus_segments = 0
        if (quota := QUOTAS.get(owner)) is not None:
            held = [known for known in books._known() if known.entry.owner == owner]
            self.surplus_pages = pages_in(held) + self.needed - quota.pages
            self.surplus_segments = len(held) + len(missing) - quota.segments

    @property
    def suffices(self) -> bool:
        return self.free + pages_in(self.evictable) >= self.needed and self._makes_up(self.own)

    def check_victims(self) -> None:
        victims = [known for known in self.evictable if known.entry.detached]
        freed = self.free + pages_in(victims)
        if self.surplus_pages > 0 or self.surplus_segments > 0:
            assert self._makes_up([known for known in self.own if known.entry.detached])
        elif victims:  # no more than needed: without the last eviction, pages would be missing
            assert min(freed - known.pages for known in victims) < self.needed <= freed

    def _makes_up(self, victims: list[Known]) -> bool:
        return pages_in(victims) >= self.surplus_pages and len(victims) >= self.surplus_segments


def pages_in(entries: Iterable[Known]) -> int:
    return sum(known.pages for known in entries)


def pages_of(name: Name) -> int:
    return -(-name[1].num_tokens // PAGE_TOKENS)


def status_of(known: Known | None, *, is_new: bool) -> ChunkStatus:
    if is_new:
        return ChunkStatus.FILLED
    return ChunkStatus.HIT if known.state is EntryState.READY else ChunkStatus.WAITED


@pytest.mark.parametrize("policy", get_args(EvictionPolicyName))
def test_any_order_of_calls_keeps_the_books(policy):
    machine = type("BooksOf" + policy, (Books,), {"policy": policy})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=EXAMPLES, stateful_step_count=STEPS, derandomize=True, database=None, deadline=None
        ),
    )
    assert machine.steps >= EXAMPLES * STEPS * 2 // 3  # more than 10,000 calls by default
