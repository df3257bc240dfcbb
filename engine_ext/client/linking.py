# SPDX-License-Identifier: Apache-2.0
"""The link tokens of a request, computed behind its segments (:mod:`engine_ext.chunks.links`)."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from cache.errors import CapacityError, FullAttentionError
from cache.lease import Lease
from engine_ext.chunks.chunk_cache import FillResult
from engine_ext.chunks.links import Linker, LinkError, LinkRequests, link_identities
from engine_ext.client.call import EngineCall, Stages
from engine_ext.client.segments import FilledSegments


@dataclass(frozen=True, slots=True)
class ComputedLinks:
    """A lease on computed link tokens, and the results of their requests."""

    lease: Lease
    results: Sequence[FillResult]


@asynccontextmanager
async def computed_links(filled: FilledSegments, call: EngineCall, stages: Stages) -> AsyncIterator[ComputedLinks]:
    """Computes the link tokens behind ``filled``; raises :class:`FullAttentionError`."""
    manager, request, places = filled.cache.manager, filled.placed.request, filled.placed.link_places
    try:
        links = manager.borrow(link_identities(request.chunked(), places, request.scope), places)
    except CapacityError as error:
        raise FullAttentionError("capacity", str(error)) from error
    try:
        yield ComputedLinks(links, await _link(filled, links, call, stages))
    finally:
        filled.cache.release(links)


async def _link(filled: FilledSegments, links: Lease, call: EngineCall, stages: Stages) -> list[FillResult]:
    cache, request, layout = filled.cache, filled.placed.request, filled.placed.layout
    context = request.options.link_context

    def salt_of(number: int) -> str:
        """Chained link requests compose the same KV as the main request; others compose KV of their own."""
        return request.composed_salt(cache.hasher, layout, *(() if context == "chained" else ("link", number)))

    with stages.stage("link", links=len(links.chunks)) as trace_headers:
        kwargs = call.fill_kwargs(trace_headers)
        requests = LinkRequests(call.request_id, context, salt_of, kwargs, filled.attends)
        try:
            return await Linker(call.llm, cache.manager).link(filled.lease, links, requests)
        except LinkError:
            await filled.forget_refused(call.request_id)
            raise
