# SPDX-License-Identifier: Apache-2.0
"""The manager against a simple model of it, in any order of calls.

``STATE_MACHINE_EXAMPLES=2000 pytest tests/cache/test_manager_machine.py`` runs ten times as long.
"""

import os
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from cache.hashing import CacheScope
from cache.index import ChunkKVCache, EntryState, SegmentIdentity
from cache.layout import PositionReindexer, PositionStrategy
from cache.manager import CapacityError, ChunkStatus, FillJob, Lease
from tests.cache.helpers import PAGE_TOKENS, make_manager, make_prompt, tokens

EXAMPLES = int(os.environ.get("STATE_MACHINE_EXAMPLES", "300"))
STEPS = 50
NUM_PAGES = 12
SYSTEMS = [(), tokens(100, 3), tokens(200, 6)]
CHUNKS = [tokens(300, 1), tokens(400, 4), tokens(500, 5), tokens(600, 9), tokens(700, 12), tokens(800, 17)]
SCOPES = [CacheScope("one"), CacheScope("two")]
# The system segment's identity is told from a chunk's behind no system by this flag.
Name = tuple[bool, SegmentIdentity]
picks = st.integers(0, 999)


@dataclass
class Known:
    """What the model knows of one entry."""

    entry: ChunkKVCache
    is_ready: bool = False
    is_written: bool = True
    leases: int = 0


class Books(RuleBasedStateMachine):
    """``cached`` maps what can be found, least recently used first; ``gone`` is detached but still in use."""

    steps = 0

    def __init__(self):
        super().__init__()
        self.manager = make_manager(NUM_PAGES)
        self.cached: dict[Name, Known] = {}
        self.gone: list[Known] = []
        self.leases: list[Lease] = []
        self.jobs: list[FillJob] = []
        self.lookups: Counter[str] = Counter()
        self.fills: Counter[str] = Counter()
        self.evicted = 0

    @rule(
        system=st.sampled_from(SYSTEMS),
        chunks=st.lists(st.sampled_from(CHUNKS), min_size=1, max_size=4),
        scope=st.sampled_from(SCOPES),
        strategy=st.sampled_from(PositionStrategy),
    )
    def acquire(self, system, chunks, scope, strategy):
        prompt = make_prompt(*chunks, system=system)
        layout = PositionReindexer().layout(prompt, strategy)
        wanted = [(True, SegmentIdentity(scope, (), system))] if system else []
        wanted += [(False, SegmentIdentity(scope, system, chunk)) for chunk in chunks]
        missing = [name for name in dict.fromkeys(wanted) if name not in self.cached]
        victims = self._victims(wanted, sum(pages_of(name) for name in missing))
        if victims is None:
            with pytest.raises(CapacityError):  # the invariants see that nothing has changed
                self.manager.acquire(prompt, layout, scope)
            return self._use(list(self.cached))  # only the order may have changed

        lease = self.manager.acquire(prompt, layout, scope)
        for name in victims:
            del self.cached[name]
        self.evicted += len(victims)
        taken = {page for known in self._known() for page in known.entry.pages}
        statuses = []
        for name, segment in zip(wanted, lease.segments, strict=True):
            known = self.cached.get(name)
            statuses.append(status_of(known, is_new=name in missing))
            if known is None:
                known = self.cached[name] = self._created(name, segment.entry, taken)
            known.leases += 1
            assert segment.entry is known.entry
        self._use(wanted)
        assert [segment.status for segment in lease.segments] == statuses
        assert [segment.placement for segment in lease.chunks] == list(layout.chunks)
        assert (lease.system is None) == (not system)
        self.lookups.update(statuses[len(wanted) - len(chunks) :])
        self._check_jobs(lease, missing)
        self.leases.append(lease)
        self.jobs += lease.fills
        return None

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
            known = self._find(entry)
            known.is_written, known.is_ready = False, known in self.cached.values()

    @precondition(lambda self: self.jobs)
    @rule(pick=picks, outcome=st.sampled_from(["failed", "aborted"]))
    def fill_fails(self, pick, outcome):
        job = self.jobs.pop(pick % len(self.jobs))
        self.manager.fill_failed(job, outcome)
        self.fills[outcome] += 1
        for entry in job.entries:
            self._find(entry).is_written = False
            self._detached(entry)

    @precondition(lambda self: self.cached or self.gone)
    @rule(pick=picks)
    def detach(self, pick):
        known = self._known()
        entry = known[pick % len(known)].entry
        self.manager.detach(entry)
        self._detached(entry)

    @invariant()
    def books_balance(self):
        type(self).steps += 1
        self.gone = [known for known in self.gone if known.leases or known.is_written]
        self.manager.check_integrity()
        owned = [page for known in self._known() for page in known.entry.pages]
        assert len(owned) == len(set(owned))
        assert self.manager.pool.free_pages() == set(range(NUM_PAGES)) - set(owned)

    @invariant()
    def the_index_is_as_modelled(self):
        assert list(self.manager.index) == [known.entry for known in self.cached.values()]
        for known in self.cached.values():
            assert known.entry.state is (EntryState.READY if known.is_ready else EntryState.FILLING)
        for known in self.gone:
            assert known.entry.state is EntryState.DETACHED
        for known in self._known():
            assert (known.entry.leases, known.entry.being_written) == (known.leases, known.is_written)

    @invariant()
    def counters_add_up(self):
        cached = {known.entry.tag for known in self.cached.values()}
        leased = sum(len(known.entry.pages) for known in self.cached.values() if known.leases)
        assert self.manager.occupancy() == {
            "pages_total": NUM_PAGES,
            "pages_free": NUM_PAGES - sum(len(known.entry.pages) for known in self._known()),
            "pages_leased": leased,
            "page_tokens": PAGE_TOKENS,
            "segments": len(self.cached),
            "segments_filling": len(cached & {entry.tag for job in self.jobs for entry in job.entries}),
            "segments_detached": len(self.gone),
            "leases": len(self.leases),
        }
        assert (self.manager.metrics.lookups, self.manager.metrics.fills) == (self.lookups, self.fills)
        assert self.manager.metrics.evicted_chunks == self.evicted
        assert self.manager.occupancy()["leases"] == len(self.leases)
        assert self.manager.is_idle == (not self.leases and not self.jobs)

    def teardown(self):
        """Nothing is left over once everybody has gone."""
        for job in self.jobs:
            self.manager.fill_succeeded(job)
        for lease in self.leases:
            self.manager.release(lease)
        assert self.manager.is_idle
        for entry in list(self.manager.index):
            self.manager.detach(entry)
        assert self.manager.pool.num_free == NUM_PAGES
        self.manager.check_integrity()

    def _known(self) -> list[Known]:
        return [*self.cached.values(), *self.gone]

    def _find(self, entry: ChunkKVCache) -> Known:
        (known,) = [known for known in self._known() if known.entry is entry]
        return known

    def _use(self, names: list[Name]) -> None:
        """Makes ``names`` the most recently used; their order among themselves is the manager's choice."""
        order = {entry: i for i, entry in enumerate(self.manager.index)}
        for name in sorted(set(names), key=lambda name: order[self.cached[name].entry]):
            self.cached[name] = self.cached.pop(name)

    def _created(self, name: Name, entry: ChunkKVCache, taken: set[int]) -> Known:
        assert entry.identity == name[1]
        assert len(entry.pages) == pages_of(name)
        assert taken.isdisjoint(entry.pages)
        taken.update(entry.pages)
        return Known(entry)

    def _detached(self, entry: ChunkKVCache) -> None:
        for name, known in list(self.cached.items()):
            if known.entry is entry:
                self.gone.append(self.cached.pop(name))

    def _victims(self, wanted: list[Name], needed: int) -> list[Name] | None:
        """What must be evicted for ``needed`` pages; ``None`` if that is impossible."""
        free = NUM_PAGES - sum(len(known.entry.pages) for known in self._known())
        victims = []
        for name, known in self.cached.items():
            if free >= needed:
                break
            if known.is_ready and not known.leases and name not in wanted:
                victims.append(name)
                free += len(known.entry.pages)
        return victims if free >= needed else None

    def _check_jobs(self, lease: Lease, missing: list[Name]) -> None:
        """A job for each missing chunk, the first of them with the system segment if that is missing."""
        created = [self.cached[name].entry for name in missing]
        chunks = [self.cached[name].entry for name in missing if not name[0]]
        assert [entry for job in lease.fills for entry in job.entries] == created
        assert len(lease.fills) == max(len(chunks), min(len(created), 1))
        for job in lease.fills:
            identity = job.entries[-1].identity
            assert job.prompt_ids == [*identity.prefix_ids, *identity.token_ids]


def pages_of(name: Name) -> int:
    return -(-len(name[1].token_ids) // PAGE_TOKENS)


def status_of(known: Known | None, *, is_new: bool) -> ChunkStatus:
    if is_new:
        return ChunkStatus.FILLED
    return ChunkStatus.HIT if known.is_ready else ChunkStatus.WAITED


def test_any_order_of_calls_keeps_the_books():
    Books.steps = 0
    run_state_machine_as_test(
        Books,
        settings=settings(
            max_examples=EXAMPLES, stateful_step_count=STEPS, derandomize=True, database=None, deadline=None
        ),
    )
    assert Books.steps >= EXAMPLES * STEPS * 2 // 3  # 10,000 by default
