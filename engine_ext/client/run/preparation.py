# SPDX-License-Identifier: Apache-2.0
"""From a request to segments and link tokens that can be loaded."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from cache.lease import ChunkStatus, Lease, LeasedSegment
from cache.positions.layout import Layout, Place
from cache.segments.index import ChunkKVCache
from engine_ext.chunks.cache_off import CacheOff
from engine_ext.chunks.chunk_cache import ChunkCache
from engine_ext.chunks.fills import FillError, FillResult
from engine_ext.chunks.links import LinkError, LinkRequests
from engine_ext.chunks.source import SourceResult
from engine_ext.client.admission import Admission, lease
from engine_ext.client.resolved import ResolvedRequest
from engine_ext.client.run.call import EngineCall
from engine_ext.client.stages import Stages
from engine_ext.wire.plan import TransferPlan

FILL_ATTEMPTS = 2


@dataclass(frozen=True, slots=True)
class FilledSegments:
    """A request's segments, which can be loaded. ``fills`` are the results of its own fill requests."""

    cache: ChunkCache
    request: ResolvedRequest
    layout: Layout
    link_places: Sequence[Place]
    lease: Lease
    fills: Sequence[FillResult]

    def plan(self, links: Lease | None) -> TransferPlan:
        """The load plan of the main request."""
        composition = self.request.composition(self.cache.hasher, self.layout)
        return TransferPlan.for_answer(self.lease, links, composition, attends=self.attends)

    @property
    def chunks(self) -> Sequence[LeasedSegment]:
        """The leased chunks."""
        return self.lease.chunks

    @property
    def segments(self) -> Sequence[LeasedSegment]:
        """All leased segments."""
        return self.lease.segments

    @property
    def attends(self) -> bool:
        """Whether the request reads its segments in the pool; otherwise they are loaded or shared."""
        return self.layout.placement == "attend" and bool(self.segments)

    def salt(self, *more: int | str) -> str:
        """Cache salt of the KV that the main request composes, or, with ``more``, another one."""
        return self.request.composed_salt(self.cache.hasher, self.layout, *more)

    def sources(self) -> dict[ChunkKVCache, SourceResult]:
        """Origins of the segments of the request's own fills, where tiers or replicas were asked."""
        pairs = zip(self.lease.fills, self.fills, strict=False)
        return {entry: result.source for job, result in pairs if result.source for entry in job.entries}

    def release(self) -> None:
        """Ends the lease."""
        self.cache.release(self.lease)

    async def link(self, links: Lease, requests: LinkRequests) -> list[FillResult]:
        """Computes link tokens behind the segments; raises :class:`FullAttentionError`."""
        return await self.cache.link(self.lease, links, requests)

    async def forget_refused(self, request_id: str) -> bool:
        """Drops the segments that a worker refused to load; False if there are none."""
        return await self.cache.forget_refused(self.lease, request_id)

    def name_documents(self) -> None:
        """Publishes the segments under the registry's keys."""
        self.cache.name(self.request.documents(self.lease))


@dataclass(frozen=True, slots=True)
class ComputedLinks:
    """A lease on computed link tokens, if any, and the results of their requests."""

    lease: Lease | None = None
    results: Sequence[FillResult] = ()


@asynccontextmanager
async def filled_segments(
    cache: ChunkCache | CacheOff, request: ResolvedRequest, call: EngineCall, stages: Stages
) -> AsyncIterator[FilledSegments]:
    """Leases the segments of ``request`` and fills missing ones; raises :class:`FullAttentionError`."""
    filled = await _filled(cache, request, call, stages)
    try:
        yield filled
    finally:
        filled.release()


@asynccontextmanager
async def computed_links(filled: FilledSegments, call: EngineCall, stages: Stages) -> AsyncIterator[ComputedLinks]:
    """Computes the link tokens behind ``filled``, if any; raises :class:`FullAttentionError`."""
    if not filled.link_places:
        yield ComputedLinks()
        return
    cache, request = filled.cache, filled.request
    links = cache.borrow_links(request.chunked(), filled.link_places, request.scope)
    try:
        yield ComputedLinks(links, await _link(filled, links, call, stages))
    finally:
        cache.release(links)


async def _filled(
    cache: ChunkCache | CacheOff, request: ResolvedRequest, call: EngineCall, stages: Stages
) -> FilledSegments:
    """Leases and fills; after a failed fill, the first request that waited for it tries again."""
    request.chunked()  # a request refused without a look at the cache has no stage "plan"
    for attempt in range(1, FILL_ATTEMPTS + 1):
        with stages.stage("plan"):
            admission, leased = lease(cache, request)
        try:
            fills = await _fill(admission, request, leased, call, stages)
            return FilledSegments(admission.cache, request, admission.layout, admission.links, leased, fills)
        except BaseException as error:
            admission.cache.release(leased)
            if not isinstance(error, FillError) or attempt == FILL_ATTEMPTS:
                raise
    raise AssertionError("unreachable")


async def _fill(
    admission: Admission, request: ResolvedRequest, leased: Lease, call: EngineCall, stages: Stages
) -> list[FillResult]:
    if all(segment.status is ChunkStatus.HIT for segment in leased.segments):
        return []
    cache = admission.cache
    salt = request.plain_salt(cache.hasher)
    with stages.stage("fill") as span:
        span.describe({"fills": len(leased.fills)})
        kwargs = call.fill_kwargs(span.headers)
        tasks = cache.start_fills(leased, call.request_id, salt, request.documents(leased), **kwargs)
        return await cache.wait(leased, tasks)


async def _link(filled: FilledSegments, links: Lease, call: EngineCall, stages: Stages) -> list[FillResult]:
    context = filled.request.options.link_context

    def salt_of(number: int) -> str:
        """Chained link requests compose the same KV as the main request; others compose KV of their own."""
        return filled.salt() if context == "chained" else filled.salt("link", number)

    with stages.stage("link") as span:
        span.describe({"links": len(links.chunks)})
        kwargs = call.fill_kwargs(span.headers)
        requests = LinkRequests(call.request_id, context, salt_of, kwargs, filled.attends)
        try:
            return await filled.link(links, requests)
        except LinkError:
            await filled.forget_refused(call.request_id)
            raise
