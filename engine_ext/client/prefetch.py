# SPDX-License-Identifier: Apache-2.0
"""Segments that come into the pool ahead of the request for them."""

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from uuid import uuid4

from cache.errors import FullAttentionError
from cache.lease import ChunkStatus, Lease
from engine_ext.chunks.cache_off import CacheOff
from engine_ext.chunks.chunk_cache import ChunkCache, FillTask
from engine_ext.client.request import ResolvedRequest, plain_salt
from engine_ext.client.segments import lease

logger = logging.getLogger(__name__)


class Prefetches:
    """Loads and fills that no request waits for yet. Each holds its lease until it ends."""

    def __init__(self, cache: ChunkCache | CacheOff) -> None:
        self._cache = cache
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, request: ResolvedRequest) -> int:
        """Starts everything that ``request`` would wait for; returns the number of segments that are not there yet.

        Raises :class:`FullAttentionError`. Of a sparse request nothing is started: the question decides what it loads.
        """
        if request.options.sparse is not None:
            return 0
        placed, leased = lease(self._cache, request)
        cache, name = placed.cache, f"prefetch-{uuid4().hex}"
        salt, documents = plain_salt(cache.hasher, request.scope), request.documents(leased)
        fills = cache.fills.start(leased, name, salt, documents, lora_request=request.lora_request)
        task = asyncio.create_task(_wait(cache, leased, fills), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(partial(_release, cache, leased))
        return sum(segment.status is not ChunkStatus.HIT for segment in leased.segments)


async def _wait(cache: ChunkCache, leased: Lease, fills: Sequence[FillTask]) -> None:
    try:
        await cache.fills.wait(leased, fills)
    except FullAttentionError as error:
        logger.info("a prefetch failed: %s", error)


def _release(cache: ChunkCache, leased: Lease, _: asyncio.Task[None]) -> None:
    cache.release(leased)
