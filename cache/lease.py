# SPDX-License-Identifier: Apache-2.0
"""A request's lease on its segments, and the fill jobs for missing ones."""

from dataclasses import dataclass, field
from enum import StrEnum

from cache.positions.layout import Place
from cache.segments.index import ChunkKVCache, EntryState


class ChunkStatus(StrEnum):
    """Origin of a request's segment in the pool."""

    HIT = "hit"
    FILLED = "filled"
    WAITED = "waited"
    FETCHED = "fetched"
    """Copied from another replica."""
    LOADED = "loaded"
    """Imported from a tier."""


@dataclass(frozen=True, slots=True)
class LeasedSegment:
    """One leased segment: its place in the sequence, and its KV."""

    place: Place
    entry: ChunkKVCache
    status: ChunkStatus

    @property
    def start(self) -> int:
        """Index of its first token in the sequence."""
        return self.place.start

    @property
    def length(self) -> int:
        """Number of tokens."""
        return self.place.length

    @property
    def tag(self) -> int:
        """Tag of its pages."""
        return self.entry.tag


@dataclass(frozen=True, slots=True, eq=False)
class FillJob:
    """One fill request to run: compute a segment and save the entries given.

    ``system`` is set in the one job that also saves the system segment; ``chunk`` is ``None`` if only that is missing.
    ``prefix`` is the system segment before the chunk, if another job saves or has saved it.
    """

    system: ChunkKVCache | None
    chunk: ChunkKVCache | None
    prefix: ChunkKVCache | None = None

    @property
    def entries(self) -> list[ChunkKVCache]:
        """The entries to fill."""
        return [entry for entry in (self.system, self.chunk) if entry is not None]

    @property
    def prompt_ids(self) -> list[int]:
        """Tokens of the fill request."""
        last = self.chunk or self.system
        assert last is not None
        return [*last.identity.prefix_ids, *last.identity.token_ids]

    @property
    def is_under_way(self) -> bool:
        """Whether an entry is still being filled."""
        return any(entry.state is EntryState.FILLING for entry in self.entries)

    @property
    def has_prefix(self) -> bool:
        """Whether the prefix can be loaded, and is leased."""
        prefix = self.prefix
        return prefix is not None and prefix.state is EntryState.READY and prefix.leases > 0

    @property
    def num_tokens(self) -> int:
        """Tokens of the entries."""
        return sum(entry.num_tokens for entry in self.entries)

    @property
    def is_private(self) -> bool:
        """Whether the entries are useless to other processes: adapter names are local to this one."""
        return any(entry.identity.scope.adapter for entry in self.entries)

    @property
    def is_wanted(self) -> bool:
        """Whether any request still waits for one of the entries."""
        return any(entry.leases for entry in self.entries)


@dataclass(slots=True, eq=False)
class Lease:
    """A request's lease on its segments. ``system`` is ``None`` if the system segment is empty.

    ``fills`` are the jobs that the holder must start. Segments of other requests' fills have status ``waited``.
    """

    system: LeasedSegment | None
    chunks: list[LeasedSegment]
    since: float
    """Seconds since the epoch."""
    fills: list[FillJob] = field(default_factory=list)

    @property
    def segments(self) -> list[LeasedSegment]:
        """Every leased segment, in sequence order."""
        return [*([self.system] if self.system else []), *self.chunks]


def status_of(entry: ChunkKVCache, *, is_new: bool) -> ChunkStatus:
    """The status of ``entry`` in a new lease."""
    if is_new:
        return ChunkStatus.FILLED
    return ChunkStatus.HIT if entry.state is EntryState.READY else ChunkStatus.WAITED


def fill_jobs(system: LeasedSegment | None, chunks: list[LeasedSegment]) -> list[FillJob]:
    """One job per missing segment; the system segment shares one with the first missing chunk behind it."""
    missing = dict.fromkeys(s.entry for s in chunks if s.status is ChunkStatus.FILLED)
    missing_system = system.entry if system and system.status is ChunkStatus.FILLED else None
    jobs = []
    for chunk in missing:
        is_behind = system is not None and chunk.identity.prefix == system.entry.identity.tokens
        if is_behind and missing_system is not None:
            jobs.append(FillJob(missing_system, chunk))
            missing_system = None
        else:
            jobs.append(FillJob(None, chunk, system.entry if system and is_behind else None))
    if missing_system is not None:
        jobs.insert(0, FillJob(missing_system, None))
    return jobs
