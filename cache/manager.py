# SPDX-License-Identifier: Apache-2.0
"""Owner of all cache state: which segments are in the pool, who may load them, what is evicted.

One event loop calls it; nothing here blocks, computes or knows an engine. An entry has two lives. Its KV is being
computed (FILLING), can be loaded (READY) or was never saved (FAILED). And the index finds it until it is detached:
evicted, expired, deleted, refused by a worker. Whoever leased it before may load it all the same: that it can't be
found any more says nothing about its KV. A page is free again when its entry is detached, not FILLING, and not leased.
"""

import itertools
import secrets
from collections import Counter
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

from cache import clock as steady_clock
from cache.chunk_ids import ChunkIds
from cache.config import ChunkCacheConfig
from cache.errors import CapacityError, IntegrityError
from cache.eviction import EvictionPolicy, make_policy, prefill_cost
from cache.expiry import ExpiryQueue
from cache.hashing import CacheScope, ChunkHash, ChunkHasher
from cache.holdings import DocumentKey, Holdings
from cache.index import ChunkHashIndex, ChunkKVCache, EntryState, SegmentIdentity
from cache.layout import ChunkedPrompt, Layout, Placement, pack
from cache.lease import ChunkStatus, FillJob, Lease, LeasedSegment, fill_jobs, status_of
from cache.metrics import ChunkCacheMetrics
from cache.pool import ChunkBlockPool
from cache.quotas import Usage


class Removal(StrEnum):
    """Why an entry can't be found any more."""

    EVICTED = "evicted"
    EXPIRED = "expired"
    DELETED = "deleted"
    CLEARED = "cleared"
    FILL_FAILED = "fill_failed"
    REFUSED = "refused"
    COLLISION = "collision"
    ASLEEP = "asleep"
    RESET = "reset"
    """The weights may have changed, or all KV was to be forgotten."""


class Wanted(NamedTuple):
    """One segment of a prompt: its key, what the key stands for, and the entry if there is one."""

    key: ChunkHash
    identity: SegmentIdentity
    is_system: bool
    entry: ChunkKVCache | None


@dataclass(frozen=True, slots=True)
class Lookup:
    """What the index has of one prompt."""

    segments: list[Wanted]
    pages_needed: int
    """For the segments that are missing, each distinct one once; likewise ``num_missing``."""
    num_missing: int


_NO_KEY: Final = ChunkHash(b"")


class ChunkCacheManager:
    """The chunk cache of one engine."""

    def __init__(self, config: ChunkCacheConfig, clock: Callable[[], float] = steady_clock.now) -> None:
        self.config = config
        self.hasher = ChunkHasher(config.fingerprint, config.hash_algorithm)
        self.pool = ChunkBlockPool(config.num_pages)
        self.index = ChunkHashIndex()
        self.ids = ChunkIds()
        self.holdings = Holdings(config.page_bytes)
        self.usage = Usage()
        self.metrics = ChunkCacheMetrics()
        self.clock = clock
        self._policy: EvictionPolicy[ChunkKVCache] = make_policy(config.eviction)
        self._expiry = ExpiryQueue()
        self.on_expired: Callable[[ChunkHash], None] = lambda _: None
        self._leases: set[Lease] = set()
        self._filling: set[ChunkKVCache] = set()
        self._detached: set[ChunkKVCache] = set()
        self._pinned_pages = 0
        # Tags start at random, so a page of an earlier process in the same memory can't match by accident.
        self._tags = itertools.count(secrets.randbits(61))

    @property
    def is_idle(self) -> bool:
        """No request holds a lease and no fill is under way."""
        return not self._leases and not self._detached and not self._filling

    def look_up(self, prompt: ChunkedPrompt, scope: CacheScope) -> Lookup:
        """What is cached of the system segment (if not empty) and of each chunk; changes nothing."""
        system, prefix = pack(prompt.system), pack(prompt.chunk_prefix)
        system_key, prefix_key = self.hasher.system_key(scope, system), self.hasher.system_key(scope, prefix)
        segments = [self._wanted(system_key, SegmentIdentity(scope, b"", system), is_system=True)] if system else []
        chunks = [chunk.packed for chunk in prompt.chunks]
        for key, tokens in zip(self.hasher.chunk_keys(scope, prefix_key, chunks), chunks, strict=True):
            segments.append(self._wanted(key, SegmentIdentity(scope, prefix, tokens), is_system=False))
        missing = {wanted.key: wanted.identity for wanted in segments if wanted.entry is None}
        pages = sum(self.config.pages_for(identity.num_tokens) for identity in missing.values())
        return Lookup(segments, pages, len(missing))

    def acquire(self, prompt: ChunkedPrompt, layout: Layout, scope: CacheScope) -> Lease:
        """Leases every segment before the question, allocating pages for those missing.

        Raises :class:`CapacityError`, having evicted nothing, if they can't all be held.
        """
        self.expire()
        found = self.look_up(prompt, scope)
        identities = {wanted.key: wanted.identity for wanted in found.segments}
        if any(identities[wanted.key] != wanted.identity for wanted in found.segments):
            raise CapacityError("two segments of the request have the same hash")
        self._make_room(found, scope.owner)
        for entry in {wanted.entry: None for wanted in found.segments if wanted.entry is not None}:
            self._use(entry)
        created = {w.key: self._create(w) for w in {w.key: w for w in found.segments if w.entry is None}.values()}
        lease = self._lease(found, created, layout)
        self.metrics.lookups.update(segment.status for segment in lease.chunks)
        return lease

    def borrow(self, identities: Sequence[SegmentIdentity], placements: Sequence[Placement]) -> Lease:
        """A lease on segments to compute for one request alone: nobody else finds them, and they end with the lease.

        Raises :class:`CapacityError`, having evicted nothing, if they can't all be held.
        """
        wanted = [Wanted(_NO_KEY, identity, False, None) for identity in identities]
        pages = sum(self.config.pages_for(identity.num_tokens) for identity in identities)
        self._make_room(Lookup(wanted, pages, len(wanted)), identities[0].scope.owner)
        segments = []
        for each, placement in zip(wanted, placements, strict=True):
            entry = self._allocated(each)
            entry.detached, entry.leases = True, 1
            self._detached.add(entry)
            segments.append(LeasedSegment(placement, entry, ChunkStatus.FILLED))
        lease = Lease(None, segments, self.clock(), [FillJob(None, segment.entry) for segment in segments])
        self._leases.add(lease)
        return lease

    def hold(self, key: ChunkHash) -> Lease | None:
        """A lease on one segment where it was computed, if it can be loaded now."""
        self.expire()
        entry = self.index.by_key(key)
        if entry is None or entry.state is not EntryState.READY:
            return None
        entry.leases += 1
        start, length = entry.identity.num_prefix_tokens, entry.identity.num_tokens
        lease = Lease(None, [LeasedSegment(Placement(start, length, start, 0), entry, ChunkStatus.HIT)], self.clock())
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
        """The job's KV is in the pool; its entries may be loaded."""
        self.metrics.fills[outcome] += 1
        for entry in job.entries:
            entry.state = EntryState.READY
            self._filling.remove(entry)
            self._reclaim(entry)

    def fill_failed(self, job: FillJob, outcome: str = "failed") -> None:
        """The job's fill request has ended without saving; its entries are dropped."""
        self.metrics.fills[outcome] += 1
        for entry in job.entries:
            entry.state = EntryState.FAILED
            self._filling.remove(entry)
            self.detach(entry, Removal.FILL_FAILED)

    def retain(self, entry: ChunkKVCache, *, pinned: bool, expires_at: float | None) -> None:
        """Says how long to keep an entry that the index holds; the last word counts.

        Raises :class:`CapacityError` if pinning it would leave too little for everybody else.
        """
        if pinned and not entry.pinned:
            limit = int(self.config.num_pages * self.config.max_pinned_share)
            if self._pinned_pages + entry.num_pages > limit:
                raise CapacityError(
                    f"pinning {entry.num_pages} more pages would exceed {limit} of {self.config.num_pages} pages; "
                    f"{self._pinned_pages} are pinned"
                )
        if pinned != entry.pinned:
            entry.pinned = pinned
            self._pinned_pages += entry.num_pages if pinned else -entry.num_pages
            (self._policy.removed if pinned else self._policy.added)(entry)
        entry.expires_at = expires_at
        if expires_at is not None:
            self._expiry.put(entry)

    def name(self, document: DocumentKey, entry: ChunkKVCache) -> None:
        """Says that ``entry``, which can be loaded, is (part of) ``document``, for as long as it can be found."""
        if not entry.detached:
            self.holdings.add(document, entry)

    def expire(self) -> None:
        """Detaches what has expired."""
        for entry in self._expiry.due(self.clock()):
            self.detach(entry, Removal.EXPIRED)
            self.on_expired(entry.key)

    def detach(self, entry: ChunkKVCache, why: Removal) -> None:
        """Makes ``entry`` unfindable; its pages are freed once nobody reads or writes them."""
        if not entry.detached:
            entry.detached = True
            self.index.remove(entry)
            self._detached.add(entry)
            self._forget(entry, why)
        self._reclaim(entry)

    def clear(self, namespace: str | None = None, why: Removal = Removal.CLEARED) -> list[ChunkHash]:
        """Detaches every entry (of ``namespace``, if given); returns their keys."""
        entries = [e for e in self.index if namespace is None or e.identity.scope.namespace == namespace]
        for entry in entries:
            self.detach(entry, why)
        return [entry.key for entry in entries]

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
        if self._filling != {entry for entry in entries if entry.state is EntryState.FILLING}:
            raise IntegrityError(f"{len(self._filling)} fills are under way, but entries say otherwise")
        if any(entry.detached or entry.state is EntryState.FAILED for entry in self.index):
            raise IntegrityError("the index finds an entry that was detached")
        counted = Usage()
        for entry in entries:
            counted.add(entry)
        if counted != self.usage:
            raise IntegrityError("what owners have of the pool is not what is counted for them")
        if self._pinned_pages != sum(entry.num_pages for entry in self.index if entry.pinned):
            raise IntegrityError(f"{self._pinned_pages} pages are pinned, but entries say otherwise")

    def occupancy(self) -> dict[str, int]:
        """Sizes, in pages, segments and leases."""
        leased = {segment.entry for lease in self._leases for segment in lease.segments}
        return {
            "pages_total": self.config.num_pages,
            "pages_free": self.pool.num_free,
            "pages_leased": sum(entry.num_pages for entry in leased if not entry.detached),
            "pages_pinned": self._pinned_pages,
            "page_tokens": self.config.page_tokens,
            "segments": len(self.index),
            "segments_filling": len(self._filling),
            "segments_detached": len(self._detached),
            "leases": len(self._leases),
        }

    def num_pages_held(self) -> int:
        """Pages that can't be freed for others now: pinned, leased, or being computed."""
        leased = {segment.entry for lease in self._leases for segment in lease.segments}
        held = leased | self._filling | self._detached
        return self._pinned_pages + sum(entry.num_pages for entry in held if not entry.pinned)

    def available_pages(self, sparing: Set[ChunkKVCache]) -> int:
        """Pages that are free, or could be freed by evicting anything that is in the index but not in ``sparing``."""
        leased = {segment.entry for lease in self._leases for segment in lease.segments}
        held = leased | self._filling | self._detached | sparing
        pinned = self._pinned_pages - sum(entry.num_pages for entry in held if entry.pinned)
        return self.config.num_pages - sum(entry.num_pages for entry in held) - pinned

    def oldest_lease_seconds(self) -> float:
        """Age of the oldest lease; 0 without any."""
        now = self.clock()
        return now - min((lease.since for lease in self._leases), default=now)

    def _wanted(self, key: ChunkHash, identity: SegmentIdentity, *, is_system: bool) -> Wanted:
        return Wanted(key, identity, is_system, self.index.get(key, identity))

    def _use(self, entry: ChunkKVCache) -> None:
        entry.hits += 1
        entry.last_used_at = self.clock()
        if not entry.pinned:
            self._policy.used(entry)

    def _make_room(self, found: Lookup, owner: str) -> None:
        """Evicts, as the policy has it, until what is missing fits, sparing what was found.

        An owner that would exceed its quota makes room for itself first.
        """
        spared = {wanted.entry for wanted in found.segments if wanted.entry is not None}
        pages, segments = self.usage.surplus(owner, found.pages_needed, found.num_missing)
        own = self._victims(pages, segments, spared, owner)
        if own is None:
            raise CapacityError(f"the chunks need more than what {owner!r} may have of the pool")
        free = self.pool.num_free + sum(entry.num_pages for entry in own)
        others = self._victims(found.pages_needed - free, 0, spared | set(own))
        if others is None:
            raise CapacityError(self._capacity_message(found, self.available_pages(spared)))
        for entry in (*own, *others):
            self.detach(entry, Removal.EVICTED)

    def _victims(
        self, pages: int, segments: int, spared: Set[ChunkKVCache], owner: str | None = None
    ) -> list[ChunkKVCache] | None:
        """So many pages and segments (of ``owner``, if given) to give up; ``None`` if there aren't so many."""
        victims: list[ChunkKVCache] = []
        if max(pages, segments) <= 0:
            return victims
        for entry in self._policy.victims():
            is_free = entry.state is EntryState.READY and not entry.leases and entry not in spared
            if is_free and owner in (None, entry.identity.scope.owner):
                victims.append(entry)
                pages, segments = pages - entry.num_pages, segments - 1
                if max(pages, segments) <= 0:
                    return victims
        return None

    def _capacity_message(self, found: Lookup, available: int) -> str:
        total, page = self.config.num_pages, self.config.page_tokens
        longest = max(wanted.identity.num_tokens for wanted in found.segments)
        if self.config.pages_for(longest) > total:
            return f"a segment of {longest} tokens is longer than the chunk pool of {total * page} tokens"
        return f"the chunks need {found.pages_needed} more pages of {page} tokens; {available} of {total} can be freed"

    def _create(self, wanted: Wanted) -> ChunkKVCache:
        entry = self._allocated(wanted)
        if (displaced := self.index.put(entry)) is not None:
            self.detach(displaced, Removal.COLLISION)
        self._policy.added(entry)
        return entry

    def _allocated(self, wanted: Wanted) -> ChunkKVCache:
        """A new entry that has its pages and is to be filled."""
        identity, now = wanted.identity, self.clock()
        entry = ChunkKVCache(
            wanted.key,
            identity,
            self.pool.allocate(self.config.pages_for(identity.num_tokens)),
            tag=next(self._tags),
            recompute_cost=prefill_cost(identity.num_prefix_tokens, identity.num_tokens),
            created_at=now,
            last_used_at=now,
            is_system=wanted.is_system,
        )
        self._filling.add(entry)
        self.usage.add(entry)
        return entry

    def _lease(self, found: Lookup, created: dict[ChunkHash, ChunkKVCache], layout: Layout) -> Lease:
        has_system = found.segments[0].is_system
        placements = [*([layout.system] if has_system else []), *layout.chunks]
        segments = []
        for wanted, placement in zip(found.segments, placements, strict=True):
            entry = wanted.entry or created[wanted.key]
            entry.leases += 1
            segments.append(LeasedSegment(placement, entry, status_of(entry, is_new=wanted.entry is None)))
        system = segments.pop(0) if has_system else None
        lease = Lease(system, segments, self.clock(), fill_jobs(system, segments))
        self._leases.add(lease)
        return lease

    def _forget(self, entry: ChunkKVCache, why: Removal) -> None:
        """Takes a detached entry out of everything that only concerns what can be found."""
        if entry.pinned:
            entry.pinned = False
            self._pinned_pages -= entry.num_pages
        elif why is Removal.EVICTED:
            self._policy.evicted(entry)
        else:
            self._policy.removed(entry)
        self.metrics.removals[why] += 1
        self.ids.removed(entry.key, why)
        self.holdings.removed(entry.key)

    def _reclaim(self, entry: ChunkKVCache) -> None:
        if entry in self._detached and not entry.leases and entry.state is not EntryState.FILLING:
            self._detached.remove(entry)
            self.usage.remove(entry)
            self.pool.free(entry.pages)
