# SPDX-License-Identifier: Apache-2.0
"""Owner of all cache state: segments in the pool, leases on them, evictions.

One event loop calls it; nothing here blocks, computes or knows an engine. An entry has two independent states. Its KV
is being computed (FILLING), can be loaded (READY) or was never saved (FAILED). And the index finds it until it is
detached: evicted, expired, deleted, refused by a worker. Earlier leases on a detached entry stay valid, since its KV is
unchanged. A page is free again when its entry is detached, not FILLING, and not leased.
"""

import itertools
import secrets
from collections.abc import Callable, Sequence
from typing import Final

from cache.books import Books
from cache.config import ChunkCacheConfig
from cache.errors import CapacityError
from cache.eviction.pins import Pins
from cache.eviction.policies import EvictionPolicy, make_policy
from cache.eviction.quotas import Quota, Usage, unlimited
from cache.eviction.removal import Removal
from cache.eviction.room import Room
from cache.lease import ChunkStatus, FillJob, Lease, LeasedSegment, fill_jobs, status_of
from cache.metrics import ChunkCacheMetrics
from cache.pool import ChunkBlockPool
from cache.positions.layout import ChunkedPrompt, Layout, Place
from cache.segments.away import Away
from cache.segments.chunk_ids import ChunkIds, ChunkName
from cache.segments.hashing import CacheScope, ChunkHash, ChunkHasher
from cache.segments.holdings import DocumentKey, Holdings
from cache.segments.index import (
    ChunkHashIndex,
    ChunkKVCache,
    EntryState,
    ExpiryQueue,
    Fit,
    Lookup,
    PromptSegment,
    SegmentIdentity,
    look_up,
    now,
)

_NO_KEY: Final = ChunkHash(b"")


def _ignore(name: object) -> None:
    pass


class ChunkCacheManager:
    """The state of one engine's chunk cache.

    ``quota_of`` gives an owner's quota; ``on_expired`` is called with the key of each segment that has expired,
    ``on_id`` as :class:`ChunkIds` says.
    """

    def __init__(
        self,
        config: ChunkCacheConfig,
        clock: Callable[[], float] = now,
        *,
        quota_of: Callable[[str], Quota] = unlimited,
        on_expired: Callable[[ChunkHash], None] = _ignore,
        on_id: Callable[[ChunkName], None] = _ignore,
    ) -> None:
        self.config = config
        self.hasher = ChunkHasher(config.fingerprint)
        self.pool = ChunkBlockPool(config.num_pages)
        self.index = ChunkHashIndex()
        self.ids = ChunkIds(on_id)
        self.holdings = Holdings()
        self.usage = Usage(quota_of)
        self.metrics = ChunkCacheMetrics()
        self.clock = clock
        self._policy: EvictionPolicy[ChunkKVCache] = make_policy(config.eviction)
        self._expiry = ExpiryQueue()
        # Tags start at random, so a page of an earlier process in the same memory can't match by accident.
        self._tags = itertools.count(secrets.randbits(61))
        self.away = Away(self.ids, self.holdings, self._expiry, self._tags)
        self._on_expired = on_expired
        self._leases: set[Lease] = set()
        self._filling: set[ChunkKVCache] = set()
        self._detached: set[ChunkKVCache] = set()
        self._pins = Pins(config.num_pages)
        self._books = Books(
            config, self.pool, self.index, self.usage, self._pins, self._leases, self._filling, self._detached
        )
        self._room = Room(self._policy, self._books)

    @property
    def is_idle(self) -> bool:
        """Whether no request holds a lease and no fill is under way."""
        return not self._leases and not self._detached and not self._filling

    def look_up(self, prompt: ChunkedPrompt, scope: CacheScope) -> Lookup:
        """The system segment (if not empty) and each chunk, found or missing; changes nothing."""
        return look_up(prompt, scope, self.hasher, self.index, self.config)

    def fit(self, found: Lookup, owner: str, num_windows: int = 0) -> Fit:
        """How the pool can hold the segments of ``found`` now, and windows of a page beside them; changes nothing.

        Raises :class:`CapacityError` if it can't.
        """
        if found.is_ambiguous:
            raise CapacityError("two segments of the request have the same hash")
        if num_windows:
            self._room.evictions(found, owner, num_windows, num_windows)
        return Fit(found, self._room.evictions(found, owner) if found.num_missing else [])

    def lease(self, fit: Fit, layout: Layout) -> Lease:
        """Leases the segments of ``fit``, which must be the cache's state now."""
        found = fit.found
        for entry in fit.evicted:
            self.detach(entry, Removal.EVICTED)
        for entry in {wanted.entry: None for wanted in found.segments if wanted.entry is not None}:
            self._use(entry)
        created = {w.key: self._create(w) for w in {w.key: w for w in found.segments if w.entry is None}.values()}
        lease = self._lease(found, created, layout)
        self.metrics.lookups.update(segment.status for segment in lease.chunks)
        return lease

    def borrow(self, identities: Sequence[SegmentIdentity], places: Sequence[Place]) -> Lease:
        """A lease on segments for one request alone, which end with it.

        Raises :class:`CapacityError`, having evicted nothing, if they can't all be held.
        """
        wanted = [PromptSegment(_NO_KEY, identity, False, None) for identity in identities]
        pages = sum(self.config.pages_for(identity.num_tokens) for identity in identities)
        for entry in self._room.evictions(Lookup(wanted, pages, len(wanted)), identities[0].scope.owner):
            self.detach(entry, Removal.EVICTED)
        segments = []
        for each, place in zip(wanted, places, strict=True):
            entry = self._allocated(each)
            entry.detached, entry.leases = True, 1
            self._detached.add(entry)
            segments.append(LeasedSegment(place, entry, ChunkStatus.FILLED))
        lease = Lease(None, segments, self.clock(), [FillJob(None, segment.entry) for segment in segments])
        self._leases.add(lease)
        return lease

    def find(self, key: ChunkHash) -> ChunkKVCache | None:
        """The segment's entry, in the pool or in tiers only."""
        return self.index.by_key(key) or self.away.get(key)

    def hold(self, key: ChunkHash) -> Lease | None:
        """A lease on one segment at its computed position, if it can be loaded now."""
        self.expire()
        entry = self.index.by_key(key)
        if entry is None or entry.state is not EntryState.READY:
            return None
        entry.leases += 1
        start, length = entry.identity.num_prefix_tokens, entry.identity.num_tokens
        lease = Lease(None, [LeasedSegment(Place(start, length, start, 0), entry, ChunkStatus.HIT)], self.clock())
        self._leases.add(lease)
        return lease

    def release(self, lease: Lease) -> None:
        """Ends a lease; its chunks may be evicted from now on. Raises ``KeyError`` if it has ended already."""
        self._leases.remove(lease)
        self.metrics.lease_seconds.observe(self.clock() - lease.since)
        for segment in lease.segments:
            segment.entry.leases -= 1
            self._reclaim(segment.entry)

    def fill_succeeded(self, job: FillJob, outcome: str = "succeeded") -> None:
        """Records that the job's KV is in the pool: its entries can be loaded."""
        self.metrics.fills[outcome] += 1
        for entry in job.entries:
            entry.state = EntryState.READY
            self.away.came_back(entry)
            self._filling.remove(entry)
            self._reclaim(entry)

    def fill_failed(self, job: FillJob, outcome: str = "failed") -> None:
        """Records that the job ended without saving, and drops its entries."""
        self.metrics.fills[outcome] += 1
        for entry in job.entries:
            entry.state = EntryState.FAILED
            self._filling.remove(entry)
            self.detach(entry, Removal.FILL_FAILED)

    def retain(self, entry: ChunkKVCache, *, pinned: bool, expires_at: float | None) -> None:
        """Sets how long to keep an entry that the index holds; a later call replaces it.

        Raises :class:`CapacityError` if pinning the entry would leave too little for others.
        """
        if pinned != entry.pinned:
            (self._pins.pin if pinned else self._pins.unpin)(entry)
            (self._policy.removed if pinned else self._policy.added)(entry)
        self._expiry.put(entry, expires_at)

    def name(self, document: DocumentKey, entry: ChunkKVCache) -> None:
        """Records that ``entry``, which can be loaded, is (part of) ``document``, until it is detached."""
        if not entry.detached:
            self.holdings.add(document, entry)

    def expire(self) -> None:
        """Detaches expired entries."""
        for entry in self._expiry.due(self.clock()):
            if self.away.get(entry.key) is entry or not entry.detached:
                self.detach(entry, Removal.EXPIRED)
                self._on_expired(entry.key)

    def detach(self, entry: ChunkKVCache, why: Removal) -> None:
        """Removes ``entry`` from the index; its pages are freed when nobody reads or writes them.

        An entry that is in tiers only is forgotten, unless another one of its key has replaced it.
        """
        if entry.state is EntryState.STORED:
            if self.away.get(entry.key) is entry:
                self.away.forget(entry.key, why)
            return
        if not entry.detached:
            entry.detached = True
            self.index.remove(entry)
            self._detached.add(entry)
            self._forget(entry, why)
        self._reclaim(entry)

    def clear(self, namespace: str | None = None, why: Removal = Removal.CLEARED) -> list[ChunkHash]:
        """Detaches every entry (of ``namespace``, if given); returns their keys."""
        entries = [*self.index, *self.away]
        cleared = [e for e in entries if namespace is None or e.identity.scope.namespace == namespace]
        for entry in cleared:
            self.detach(entry, why)
        return [entry.key for entry in cleared]

    def check_integrity(self) -> None:
        """Raises :class:`IntegrityError` unless every page has one owner and every lease is accounted for."""
        self._books.check()

    def occupancy(self) -> dict[str, int]:
        """Sizes, in pages, segments and leases."""
        return self._books.occupancy()

    def num_pages_held(self) -> int:
        """Pages that can't be freed for others now: pinned, leased, or being computed."""
        return self._books.num_pages_held()

    def oldest_lease_seconds(self) -> float:
        """Age of the oldest lease; 0 without any."""
        now = self.clock()
        return now - min((lease.since for lease in self._leases), default=now)

    def _use(self, entry: ChunkKVCache) -> None:
        entry.hits += 1
        entry.last_used_at = self.clock()
        if not entry.pinned:
            self._policy.used(entry)

    def _create(self, wanted: PromptSegment) -> ChunkKVCache:
        entry = self._allocated(wanted)
        if (displaced := self.index.put(entry)) is not None:
            self.detach(displaced, Removal.COLLISION)
        self._policy.added(entry)
        if (away := self.away.get(entry.key)) is not None:
            self._expiry.put(entry, away.expires_at)
        return entry

    def _allocated(self, wanted: PromptSegment) -> ChunkKVCache:
        """A new entry with pages, to be filled."""
        identity, now = wanted.identity, self.clock()
        entry = ChunkKVCache(
            wanted.key,
            identity,
            self.pool.allocate(self.config.pages_for(identity.num_tokens)),
            tag=next(self._tags),
            created_at=now,
            last_used_at=now,
            is_system=wanted.is_system,
        )
        self._filling.add(entry)
        self.usage.add(entry)
        return entry

    def _lease(self, found: Lookup, created: dict[ChunkHash, ChunkKVCache], layout: Layout) -> Lease:
        has_system = bool(layout.system.length)
        places = [*([layout.system] if has_system else []), *layout.chunks]
        segments = []
        for wanted, place in zip(found.segments, places, strict=True):
            entry = wanted.entry or created[wanted.key]
            entry.leases += 1
            segments.append(LeasedSegment(place, entry, status_of(entry, is_new=wanted.entry is None)))
        system = segments.pop(0) if has_system else None
        lease = Lease(system, segments, self.clock(), fill_jobs(system, segments))
        self._leases.add(lease)
        return lease

    def _forget(self, entry: ChunkKVCache, why: Removal) -> None:
        """Removes a detached entry from all but the pool's books, and tiers."""
        if entry.pinned:
            self._pins.unpin(entry)
        elif why is Removal.EVICTED:
            self._policy.evicted(entry)
        else:
            self._policy.removed(entry)
        self.metrics.removals[why] += 1
        self.away.left(entry, why)

    def _reclaim(self, entry: ChunkKVCache) -> None:
        if entry in self._detached and not entry.leases and entry.state is not EntryState.FILLING:
            self._detached.remove(entry)
            self.usage.remove(entry)
            self.pool.free(entry.pages)
