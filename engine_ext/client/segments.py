# SPDX-License-Identifier: Apache-2.0
"""The segments of a request on their way into the pool: placed, leased, filled."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from cache.errors import CapacityError, FullAttentionError
from cache.lease import ChunkStatus, Lease
from cache.positions.layout import Layout, Place, PositionStrategy
from cache.segments.index import ChunkKVCache, Fit, Lookup
from cache.windows import recomputed_tokens
from engine_ext.chunks.cache_off import CacheOff
from engine_ext.chunks.chunk_cache import ChunkCache, FillError, FillResult
from engine_ext.chunks.source import SourceResult
from engine_ext.client.call import EngineCall, Stages
from engine_ext.client.request import ResolvedRequest, plain_salt

FILL_ATTEMPTS = 2


@dataclass(frozen=True, slots=True)
class PlacedSegments:
    """The places of a request's segments in its prompt, and what the cache has of them."""

    cache: ChunkCache
    request: ResolvedRequest
    layout: Layout
    found: Lookup

    @property
    def computes_text(self) -> bool:
        """Whether text between documents is computed behind everything before it, not like a chunk.

        Chunks that overlap have nothing before them.
        """
        return self.cache.no_attention is None and self.layout.strategy is PositionStrategy.OFFSET

    @property
    def chooses(self) -> bool:
        """Whether the attention to the chunks decides what the request computes anew or reads again."""
        is_reread = self.request.options.reread > 0 and len(self.request.chunked().documents) > 1
        return is_reread or self.most_chosen_windows > 0

    @property
    def most_chosen_windows(self) -> int:
        """The number of windows that the request may compute anew where its question attends."""
        config, chunks, share = self.cache.config, self.layout.chunks, self.request.options.recompute
        if share == 0 or len(chunks) == 1:
            return 0
        # Each chunk has at most one window that is shorter than a page.
        at_most = recomputed_tokens(share, chunks) // config.page_tokens + len(chunks)
        return min(sum(config.pages_for(chunk.length) for chunk in chunks[1:]), at_most)

    @property
    def most_windows(self) -> int:
        """The number of windows of a page that the request may compute anew."""
        text = self._text if self.computes_text else ()
        return sum(self.cache.config.pages_for(place.length) for place in text) + self.most_chosen_windows

    @property
    def _text(self) -> list[Place]:
        chunks = zip(self.request.chunked().chunks, self.layout.chunks, strict=True)
        return [place for chunk, place in chunks if chunk.is_text]

    def fit(self) -> Fit:
        """Room for what is missing; changes nothing. Raises :class:`FullAttentionError` if there can't be enough."""
        if self.chooses:
            self.cache.check_attention()
        try:
            return self.cache.manager.fit(self.found, self.request.scope.owner, self.most_windows)
        except CapacityError as error:
            raise FullAttentionError("capacity", str(error)) from error

    def lease(self) -> Lease:
        """Leases the segments, before anything else changes the cache; raises :class:`FullAttentionError`."""
        return self.cache.manager.lease(self.fit(), self.layout)


@dataclass(frozen=True, slots=True)
class FilledSegments:
    """A request's segments, which can be loaded. ``fills`` are the results of its own fill requests."""

    placed: PlacedSegments
    lease: Lease
    fills: Sequence[FillResult]

    @property
    def cache(self) -> ChunkCache:
        """The cache that has the segments."""
        return self.placed.cache

    @property
    def attends(self) -> bool:
        """Whether the request reads its segments in the pool; otherwise they are loaded or shared."""
        return self.placed.layout.placement == "attend" and bool(self.lease.segments)

    def sources(self) -> dict[ChunkKVCache, SourceResult]:
        """Origins of the segments of the request's own fills, where tiers or replicas were asked."""
        pairs = zip(self.lease.fills, self.fills, strict=False)
        return {entry: result.source for job, result in pairs if result.source for entry in job.entries}

    async def forget_refused(self, request_id: str) -> bool:
        """Drops the segments that a worker refused to load; False if there are none."""
        return await self.cache.forget_refused(self.lease, request_id)

    def name_documents(self) -> None:
        """Publishes the segments under the registry's keys."""
        self.cache.name(self.placed.request.documents(self.lease))


def place(cache: ChunkCache, request: ResolvedRequest) -> PlacedSegments:
    """Places the segments of ``request`` and looks them up, changing nothing; raises :class:`FullAttentionError`."""
    found = cache.manager.look_up(request.chunked(), request.scope)
    return PlacedSegments(cache, request, request.layout(cache.reindexer), found)


def lease(cache: ChunkCache | CacheOff, request: ResolvedRequest) -> tuple[PlacedSegments, Lease]:
    """Leases the segments of ``request``; raises :class:`FullAttentionError`."""
    request.chunked()  # its own reason for full attention comes before the cache's
    usable = cache.usable()
    with usable.metrics.plan_seconds.time():
        usable.manager.expire()
        placed = place(usable, request)
        return placed, placed.lease()


@asynccontextmanager
async def filled_segments(
    cache: ChunkCache | CacheOff, request: ResolvedRequest, call: EngineCall, stages: Stages
) -> AsyncIterator[FilledSegments]:
    """Leases the segments of ``request`` and fills missing ones; raises :class:`FullAttentionError`."""
    filled = await _filled(cache, request, call, stages)
    try:
        yield filled
    finally:
        filled.cache.release(filled.lease)


async def _filled(
    cache: ChunkCache | CacheOff, request: ResolvedRequest, call: EngineCall, stages: Stages
) -> FilledSegments:
    """Leases and fills; after a failed fill, the first request that waited for it tries again."""
    request.chunked()  # a request refused without a look at the cache has no stage "plan"
    for attempt in range(1, FILL_ATTEMPTS + 1):
        with stages.stage("plan"):
            placed, leased = lease(cache, request)
        try:
            is_missing = any(segment.status is not ChunkStatus.HIT for segment in leased.segments)
            fills = await _fill(placed, leased, call, stages) if is_missing else []
            return FilledSegments(placed, leased, fills)
        except BaseException as error:
            placed.cache.release(leased)
            if not isinstance(error, FillError) or attempt == FILL_ATTEMPTS:
                raise
    raise AssertionError("unreachable")


async def _fill(placed: PlacedSegments, leased: Lease, call: EngineCall, stages: Stages) -> list[FillResult]:
    cache, request = placed.cache, placed.request
    salt, documents = plain_salt(cache.hasher, request.scope), request.documents(leased)
    with stages.stage("fill", fills=len(leased.fills)) as trace_headers:
        kwargs = call.fill_kwargs(trace_headers)
        tasks = cache.fills.start(leased, call.request_id, salt, documents, **kwargs)
        return await cache.fills.wait(leased, tasks)
