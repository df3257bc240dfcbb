# SPDX-License-Identifier: Apache-2.0
"""Exports computed segments to the tiers, in the background."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from vllm.v1.engine.async_llm import AsyncLLM

from cache.eviction.removal import Removal
from cache.lease import Lease
from cache.manager import ChunkCacheManager
from cache.segments.hashing import ChunkHash
from cache.segments.index import ChunkKVCache
from cache.tiers.memory import MemoryTier
from engine_ext.chunks.tier_source import note_events
from engine_ext.chunks.transfers import PoolTransfers, TransferError
from engine_ext.wire.vllm_compat import num_unfinished_requests

logger = logging.getLogger(__name__)

MOST_WAITING: Final = 10_000
PAUSE: Final = 9
"""Length of the pause after each copy while requests run, in lengths of the copy."""


class TierWriter:
    """Stores segments in the order in which they were filled.

    A segment that is evicted before its turn is not stored.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        manager: ChunkCacheManager,
        release: Callable[[Lease], None],
        tiers: Mapping[str, int],
        transfers: Callable[[], PoolTransfers | None],
    ) -> None:
        """``tiers`` maps names to sizes on all workers together. ``release`` ends a lease of ``manager``."""
        self.tiers = tiers
        self._llm = llm
        self._manager = manager
        self._release = release
        self._transfers = transfers
        self._waiting: dict[ChunkHash, None] = {}
        self._to_drop: set[ChunkHash] = set()
        self._is_storing = False
        self._has_work = asyncio.Event()

    def __len__(self) -> int:
        return len(self._waiting) + self._is_storing

    @property
    def outlives_server(self) -> bool:
        """Whether a tier keeps its files after the server has stopped."""
        return any(tier != MemoryTier.name for tier in self.tiers)

    def add(self, entries: Iterable[ChunkKVCache]) -> None:
        """Queues filled segments; without tiers there is nothing to queue."""
        if not self.tiers:
            return
        for entry in entries:
            self._waiting[entry.key] = None
            if len(self._waiting) > MOST_WAITING:
                del self._waiting[next(iter(self._waiting))]
        self._has_work.set()

    def drop_later(self, key: ChunkHash) -> None:
        """Queues a segment to be dropped from all tiers."""
        if self.tiers:
            self._to_drop.add(key)
            self._has_work.set()

    async def drop(self, keys: Iterable[ChunkHash]) -> None:
        """Drops segments from all tiers."""
        for key in keys if self.tiers else ():
            self._waiting.pop(key, None)
            if (transfers := self._transfers()) is not None:
                try:
                    await transfers.drop(key)
                except TransferError as error:
                    logger.warning("can't drop a chunk from tiers: %s", error)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            while not self._waiting and not self._to_drop:
                self._has_work.clear()
                await self._has_work.wait()
            dropped, self._to_drop = self._to_drop, set()
            await self.drop(dropped)
            if self._waiting:
                await self._store_next()

    async def _store_next(self) -> None:
        key = next(iter(self._waiting))
        del self._waiting[key]
        self._is_storing, started = True, time.monotonic()
        try:
            await self._store(key)
        finally:
            self._is_storing = False
        if num_unfinished_requests(self._llm):
            await asyncio.sleep(PAUSE * (time.monotonic() - started))

    async def _store(self, key: ChunkHash) -> None:
        manager, transfers = self._manager, self._transfers()
        if transfers is None or (lease := manager.hold(key)) is None:
            for tier in self.tiers:
                manager.metrics.tier_events[tier, "skipped"] += 1
            return
        try:
            answers = await transfers.store(lease.chunks[0].entry)
            note_events(manager.metrics, answers)
            kept = [{tier for tier, word in each.events if word == "stored"} for each in answers]
            entry = lease.chunks[0].entry
            entry.tiers = tuple(name for name in self.tiers if all(name in each for each in kept))
            manager.holdings.moved(entry)
        except TransferError as error:
            logger.warning("can't export a chunk: %s", error)
        finally:
            self._release(lease)

    def sleep_cold(self, idle_s: float) -> tuple[int, int]:
        """Removes segments from the pool that are in a tier and unused for ``idle_s``.

        Pinned and leased segments stay. Returns the number of removed segments and of their pages.
        """
        manager = self._manager
        before = manager.clock() - idle_s
        cold = [
            entry
            for entry in manager.index
            if entry.tiers and not entry.pinned and not entry.leases and entry.last_used_at <= before
        ]
        for entry in cold:
            manager.detach(entry, Removal.ASLEEP)
        return len(cold), sum(entry.num_pages for entry in cold)
