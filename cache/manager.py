# SPDX-License-Identifier: Apache-2.0
"""Owner of all cache state: which segments are in the pool, who may load them, what is evicted.

One event loop calls it; nothing here blocks, computes or knows an engine. Ownership of a page:

=========================  =============================================  =======================================
from                       to                                             while
=========================  =============================================  =======================================
``acquire``                the fill ends (``fill_succeeded/failed``)      FILLING; the engine may write the page
``fill_succeeded``         evicted or detached, and no lease left         READY; the engine may read the page
``detach`` / ``fill_failed``  no lease left and not being written         DETACHED; never handed out again
=========================  =============================================  =======================================
"""

import itertools
import secrets
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from cache.config import ChunkCacheConfig
from cache.hashing import CacheScope, ChunkHash, ChunkHasher
from cache.index import ChunkHashIndex, ChunkKVCache, EntryState, SegmentIdentity
from cache.layout import ChunkedPrompt, Layout, Placement
from cache.metrics import ChunkCacheMetrics
from cache.pool import ChunkBlockPool


class ChunkCacheError(Exception):
    """Base of this package's errors."""


class CapacityError(ChunkCacheError):
    """The segments of one request can't all be held at once. Nothing was taken; run in full attention."""


class IntegrityError(ChunkCacheError):
    """The manager's books don't balance: a defect. The cache must not be used any further."""


class ChunkStatus(StrEnum):
    """How a segment of a request came to be in the pool."""

    HIT = "hit"
    FILLED = "filled"
    WAITED = "waited"


@dataclass(frozen=True, slots=True)
class LeasedSegment:
    """One segment that a lease holds: where it goes in the sequence, and its KV."""

    placement: Placement
    entry: ChunkKVCache
    status: ChunkStatus


@dataclass(frozen=True, slots=True, eq=False)
class FillJob:
    """One fill request to run: compute ``system + chunk`` and save the entries given.

    ``system`` is set in the one job that also saves the system segment; ``chunk`` is ``None`` if only that is missing.
    """

    system: ChunkKVCache | None
    chunk: ChunkKVCache | None

    @property
    def entries(self) -> list[ChunkKVCache]:
        """The entries that this job fills."""
        return [entry for entry in (self.system, self.chunk) if entry is not None]

    @property
    def prompt_ids(self) -> list[int]:
        """Tokens of the fill request."""
        last = self.chunk or self.system
        assert last is not None
        return [*last.identity.prefix_ids, *last.identity.token_ids]

    @property
    def is_wanted(self) -> bool:
        """Whether any request still waits for one of the entries."""
        return any(entry.leases for entry in self.entries)


@dataclass(slots=True, eq=False)
class Lease:
    """A request's hold on its segments. ``system`` is ``None`` if the system segment is empty.

    ``fills`` are the jobs that the holder must start. Segments of other requests' fills have status ``waited``.
    """

    system: LeasedSegment | None
    chunks: list[LeasedSegment]
    fills: list[FillJob] = field(default_factory=list)

    @property
    def segments(self) -> list[LeasedSegment]:
        """Every leased segment, in sequence order."""
        return [*([self.system] if self.system else []), *self.chunks]


class ChunkCacheManager:
    """The chunk cache of one engine. See the module's table for who owns a page when."""

    def __init__(self, config: ChunkCacheConfig) -> None:
        self.config = config
        self.hasher = ChunkHasher(config.fingerprint, config.hash_algorithm)
        self.pool = ChunkBlockPool(config.num_pages)
        self.index = ChunkHashIndex()
        self.metrics = ChunkCacheMetrics()
        self._leases: set[Lease] = set()
        self._detached: set[ChunkKVCache] = set()
        # Tags start at random, so a page of an earlier process in the same memory can't match by accident.
        self._tags = itertools.count(secrets.randbits(61))

    @property
    def is_idle(self) -> bool:
        """No request holds a lease and no fill is under way."""
        return not self._leases and not self._detached and all(not entry.being_written for entry in self.index)

    def acquire(self, prompt: ChunkedPrompt, layout: Layout, scope: CacheScope) -> Lease:
        """Leases every segment before the question, allocating pages for those missing.

        Raises :class:`CapacityError`, having changed nothing, if they can't all be held.
        """
        wanted = self._identities(prompt, scope)
        if len(set(wanted)) != len(dict(wanted)):
            raise CapacityError("two segments of the request have the same hash")
        found = {key: self.index.get(key, identity) for key, identity in wanted}
        self._make_room(wanted, found)
        # The system segment last, so that it is not evicted before the chunks that need it.
        for key, _ in reversed(wanted):
            if (entry := found[key]) is not None:
                self.index.touch(entry)
        created = {key: self._create(key, identity) for key, identity in dict(wanted).items() if found[key] is None}
        lease = self._lease(wanted, found, created, layout, has_system=bool(prompt.system))
        for segment in lease.chunks:
            self.metrics.lookups[segment.status] += 1
        return lease

    def release(self, lease: Lease) -> None:
        """Ends a lease; its chunks may be evicted from now on. Raises ``KeyError`` if it has ended already."""
        self._leases.remove(lease)
        for segment in lease.segments:
            segment.entry.leases -= 1
            self._reclaim(segment.entry)

    def fill_succeeded(self, job: FillJob) -> None:
        """The job's KV is saved; its entries may be loaded."""
        self.metrics.fills["succeeded"] += 1
        for entry in job.entries:
            entry.being_written = False
            if entry.state is EntryState.FILLING:
                entry.state = EntryState.READY
            self._reclaim(entry)

    def fill_failed(self, job: FillJob, outcome: str = "failed") -> None:
        """The job's fill request has ended without saving; its entries are dropped."""
        self.metrics.fills[outcome] += 1
        for entry in job.entries:
            entry.being_written = False
            self.detach(entry)

    def detach(self, entry: ChunkKVCache) -> None:
        """Makes ``entry`` unfindable; its pages are freed once nobody reads or writes them."""
        if entry.state is not EntryState.DETACHED:
            entry.state = EntryState.DETACHED
            self.index.remove(entry)
            self._detached.add(entry)
        self._reclaim(entry)

    def clear(self) -> None:
        """Detaches every entry."""
        for entry in list(self.index):
            self.detach(entry)

    def check_integrity(self) -> None:
        """Raises :class:`IntegrityError` unless every page has one owner and every lease is accounted for."""
        entries = [*self.index, *self._detached]
        owned = list(itertools.chain.from_iterable(entry.pages for entry in entries))
        free = self.pool.free_pages()
        if len(owned) + len(free) != self.config.num_pages or len(set(owned) | free) != self.config.num_pages:
            raise IntegrityError(f"{len(owned)} pages owned and {len(free)} free of {self.config.num_pages}")
        leases = Counter(segment.entry.tag for lease in self._leases for segment in lease.segments)
        if leases != Counter({entry.tag: entry.leases for entry in entries if entry.leases}):
            raise IntegrityError(f"segments leased are {leases}, but entries count {[e.leases for e in entries]}")
        for entry in self.index:
            if entry.state is EntryState.DETACHED or (entry.state is EntryState.FILLING) != entry.being_written:
                raise IntegrityError(f"entry {entry.key} is {entry.state.name}, written: {entry.being_written}")

    def occupancy(self) -> dict[str, int]:
        """Sizes, in pages, chunks and leases."""
        leased = sum(len(entry.pages) for entry in self.index if entry.leases)
        return {
            "pages_total": self.config.num_pages,
            "pages_free": self.pool.num_free,
            "pages_leased": leased,
            "page_tokens": self.config.page_tokens,
            "segments": len(self.index),
            "segments_filling": sum(entry.being_written for entry in self.index),
            "segments_detached": len(self._detached),
            "leases": len(self._leases),
        }

    def _identities(self, prompt: ChunkedPrompt, scope: CacheScope) -> list[tuple[ChunkHash, SegmentIdentity]]:
        """Keys of the system segment (if not empty), then of each chunk."""
        system_key = self.hasher.system_key(scope, prompt.system)
        wanted = [(system_key, SegmentIdentity(scope, (), prompt.system))] if prompt.system else []
        for chunk in prompt.chunks:
            key = self.hasher.chunk_key(scope, system_key, chunk.token_ids)
            wanted.append((key, SegmentIdentity(scope, prompt.system, chunk.token_ids)))
        return wanted

    def _make_room(
        self,
        wanted: list[tuple[ChunkHash, SegmentIdentity]],
        found: dict[ChunkHash, ChunkKVCache | None],
    ) -> None:
        """Evicts least recently used segments until what is missing fits, sparing those found."""
        missing = {key: identity for key, identity in wanted if found[key] is None}
        needed = sum(self.config.pages_for(len(identity.token_ids)) for identity in missing.values())
        if needed <= self.pool.num_free:
            return
        spared = {id(entry) for entry in found.values() if entry}
        victims, freed = [], self.pool.num_free
        for entry in self.index:
            if freed >= needed:
                break
            if entry.state is EntryState.READY and not entry.leases and id(entry) not in spared:
                victims.append(entry)
                freed += len(entry.pages)
        if freed < needed:
            raise CapacityError(self._capacity_message(wanted, needed, freed))
        self._evict(victims)

    def _capacity_message(self, wanted: list[tuple[ChunkHash, SegmentIdentity]], needed: int, available: int) -> str:
        total, page = self.config.num_pages, self.config.page_tokens
        longest = max(len(identity.token_ids) for _, identity in wanted)
        if self.config.pages_for(longest) > total:
            return f"a segment of {longest} tokens is longer than the chunk pool of {total * page} tokens"
        return f"the chunks need {needed} more pages of {page} tokens; {available} of {total} can be freed"

    def _evict(self, victims: Iterable[ChunkKVCache]) -> None:
        for entry in victims:
            self.detach(entry)
            self.metrics.evicted_chunks += 1

    def _create(self, key: ChunkHash, identity: SegmentIdentity) -> ChunkKVCache:
        pages = self.pool.allocate(self.config.pages_for(len(identity.token_ids)))
        entry = ChunkKVCache(key, identity, pages, tag=next(self._tags))
        if (displaced := self.index.put(entry)) is not None:
            self.detach(displaced)
        return entry

    def _lease(
        self,
        wanted: list[tuple[ChunkHash, SegmentIdentity]],
        found: dict[ChunkHash, ChunkKVCache | None],
        created: dict[ChunkHash, ChunkKVCache],
        layout: Layout,
        *,
        has_system: bool,
    ) -> Lease:
        placements = [*([layout.system] if has_system else []), *layout.chunks]
        segments = []
        for (key, _), placement in zip(wanted, placements, strict=True):
            entry = found[key] or created[key]
            entry.leases += 1
            segments.append(LeasedSegment(placement, entry, _status(entry, created)))
        system = segments.pop(0) if has_system else None
        lease = Lease(system, segments, _fill_jobs(system, segments))
        self._leases.add(lease)
        return lease

    def _reclaim(self, entry: ChunkKVCache) -> None:
        if entry in self._detached and not entry.leases and not entry.being_written:
            self._detached.remove(entry)
            self.pool.free(entry.pages)


def _status(entry: ChunkKVCache, created: dict[ChunkHash, ChunkKVCache]) -> ChunkStatus:
    if created.get(entry.key) is entry:
        return ChunkStatus.FILLED
    return ChunkStatus.HIT if entry.state is EntryState.READY else ChunkStatus.WAITED


def _fill_jobs(system: LeasedSegment | None, chunks: list[LeasedSegment]) -> list[FillJob]:
    """One job for each distinct missing chunk; the first also saves the system segment if that is missing."""
    missing = dict.fromkeys(s.entry for s in chunks if s.status is ChunkStatus.FILLED)
    missing_system = system.entry if system and system.status is ChunkStatus.FILLED else None
    if missing_system and not missing:
        return [FillJob(missing_system, None)]
    jobs = []
    for chunk in missing:
        jobs.append(FillJob(missing_system, chunk))
        missing_system = None
    return jobs
