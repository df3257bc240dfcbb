# SPDX-License-Identifier: Apache-2.0
"""Admission to the chunk cache: the same checks for a run and its preview."""

from collections.abc import Sequence
from dataclasses import dataclass

from cache.lease import Lease
from cache.positions.layout import Layout, Place
from cache.segments.index import Fit
from engine_ext.chunks.cache_off import CacheOff
from engine_ext.chunks.chunk_cache import ChunkCache
from engine_ext.chunks.links import link_places
from engine_ext.client.resolved import ResolvedRequest


@dataclass(frozen=True, slots=True)
class Admission:
    """A request that the cache can serve: places of its segments, and room for them."""

    cache: ChunkCache
    layout: Layout
    links: Sequence[Place]
    fit: Fit

    def lease(self) -> Lease:
        """Leases the segments, before anything else changes the cache."""
        return self.cache.lease(self.fit, self.layout)


def admit(cache: ChunkCache | CacheOff, request: ResolvedRequest) -> Admission:
    """Admits ``request``, changing nothing; raises :class:`FullAttentionError` if refused."""
    prompt, usable = request.chunked(), cache.usable()
    layout = request.layout(usable)
    links = link_places(layout, request.options.link_tokens)
    return Admission(usable, layout, links, usable.fit(prompt, request.scope, links))


def lease(cache: ChunkCache | CacheOff, request: ResolvedRequest) -> tuple[Admission, Lease]:
    """Admits ``request`` and leases its segments; raises :class:`FullAttentionError`."""
    with cache.metrics.plan_seconds.time():
        cache.expire()
        admission = admit(cache, request)
        return admission, admission.lease()
