# SPDX-License-Identifier: Apache-2.0
"""Admission to the chunk cache: the same checks, in the same order, for a run and for its preview."""

from collections.abc import Sequence
from dataclasses import dataclass

from cache.errors import CapacityError
from cache.lease import Lease
from cache.positions.layout import Layout, Placement
from cache.segments.lookup import Fit
from engine_ext.chunks.chunk_cache import CacheOff, ChunkCache
from engine_ext.chunks.links import link_placements
from engine_ext.client.resolved import ResolvedRequest
from engine_ext.wire.request import FullAttentionError


@dataclass(frozen=True, slots=True)
class Admission:
    """A request that the cache can serve: where its segments and link tokens go, and how the pool can hold them."""

    cache: ChunkCache
    layout: Layout
    links: Sequence[Placement]
    fit: Fit


def admit(cache: ChunkCache | CacheOff, request: ResolvedRequest) -> Admission:
    """Admits ``request``, changing nothing; raises :class:`FullAttentionError` if it has to run in full attention."""
    prompt, usable = request.chunked(), cache.usable()
    layout = usable.layout(prompt, request.options.position_strategy)
    links = link_placements(layout, request.options.link_tokens)
    try:
        return Admission(usable, layout, links, usable.manager.fit(prompt, request.scope, links))
    except CapacityError as error:
        raise FullAttentionError("capacity", str(error)) from error


def lease(cache: ChunkCache | CacheOff, request: ResolvedRequest) -> tuple[Admission, Lease]:
    """Admits ``request`` and leases its segments; raises :class:`FullAttentionError`."""
    with cache.metrics.plan_seconds.time():
        cache.expire()
        admission = admit(cache, request)
        return admission, admission.cache.manager.lease(admission.fit, admission.layout)
