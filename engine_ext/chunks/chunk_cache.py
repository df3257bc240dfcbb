# SPDX-License-Identifier: Apache-2.0
"""The chunk cache of one engine."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import Any

from vllm.v1.engine.async_llm import AsyncLLM

from cache.config import ChunkCacheConfig
from cache.costs import Costs
from cache.errors import CapacityError, IntegrityError
from cache.eviction import expiry
from cache.eviction.quotas import Quota, unlimited
from cache.eviction.removal import Removal
from cache.lease import Lease
from cache.manager import ChunkCacheManager
from cache.positions.layout import (
    ChunkedPrompt,
    Layout,
    Place,
    PlacementName,
    PositionReindexer,
    PositionStrategy,
)
from cache.segments.chunk_ids import ChunkIds
from cache.segments.hashing import CacheScope, ChunkHash
from cache.segments.holdings import DocumentKey
from cache.segments.index import ChunkKVCache, Fit, Lookup
from engine_ext.chunks.fills import FILL_LIMITS, FillLimits, FillResult, FillRunner, FillTask
from engine_ext.chunks.id_records import IdRecords
from engine_ext.chunks.links import Linker, LinkRequests, link_identities
from engine_ext.chunks.prefixes import Prefixes
from engine_ext.chunks.representations import Representations
from engine_ext.chunks.tier_source import TierSource
from engine_ext.chunks.tier_writer import TierWriter
from engine_ext.chunks.transfers import PoolTransfers
from engine_ext.wire.request import FullAttentionError

logger = logging.getLogger(__name__)


class ChunkCache:
    """The cached segments, their fills, sources, tiers and links.

    ``reindexer`` places the segments of requests. ``transfers`` is ``None`` if KV must not leave this process.
    ``tiers`` maps the tiers' names, the fastest first, to their sizes on all workers together. Sparse requests need
    ``representations``. ``quota_of`` gives an owner's quota.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        config: ChunkCacheConfig,
        limits: FillLimits = FILL_LIMITS,
        *,
        transfers: PoolTransfers | None = None,
        tiers: Mapping[str, int] = MappingProxyType({}),
        reindexer: PositionReindexer | None = None,
        representations: Representations | None = None,
        quota_of: Callable[[str], Quota] = unlimited,
        clock: Callable[[], float] = expiry.now,
    ) -> None:
        self.reason: str | None = None
        """The reason why the cache is disabled; ``None`` while it is usable."""
        self.transfers, self.representations = transfers, representations
        self.config = config
        self.manager = ChunkCacheManager(
            config,
            clock,
            quota_of=quota_of,
            on_expired=lambda key: self.tier_writer.drop_later(key),
            on_id=lambda name: self._id_records.changed(name),
        )
        self.hasher, self.holdings, self.metrics = self.manager.hasher, self.manager.holdings, self.manager.metrics
        self.costs = Costs()
        self.tier_writer = TierWriter(llm, self.manager, self.release, tiers, lambda: self.transfers)
        self._id_records = IdRecords(self.manager, lambda: self.transfers, is_kept=self.tier_writer.outlives_server)
        self.prefixes = Prefixes(self.metrics, lambda: self.transfers)
        from_tiers = [TierSource(list(tiers), self.manager, lambda: self.transfers, self.costs)] if tiers else []
        self.fills = FillRunner(
            llm,
            self.manager,
            limits,
            self.costs,
            from_tiers,
            on_computed=self.tier_writer.add,
            on_end=self._check_if_idle,
        )
        self._linker = Linker(llm, self.manager)
        self._llm = llm
        self._reindexer = reindexer or PositionReindexer()
        self._next_integrity_check = 0.0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Exports segments, ids and prefixes to the tiers within the context, if there are tiers."""
        if not self.tier_writer.tiers:
            yield
            return
        tasks = [asyncio.create_task(run()) for run in (self.tier_writer.run, self._id_records.run, self.prefixes.run)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    def usable(self) -> "ChunkCache":
        """This cache; raises :class:`FullAttentionError` if its books were found wrong."""
        if self.reason is not None:
            raise FullAttentionError("cache off", self.reason)
        return self

    @property
    def leaves_out(self) -> bool:
        """Whether sparse requests are possible."""
        return self.representations is not None

    @property
    def placement(self) -> PlacementName:
        """How requests get their chunks."""
        return self._reindexer.placement

    @property
    def block_order(self) -> str:
        """Name of the memory order of the engine's blocks."""
        return self.config.block_order

    @property
    def num_tokens(self) -> int:
        """Tokens that the pool can hold."""
        return self.config.num_pages * self.config.page_tokens

    @property
    def num_waiting(self) -> int:
        """Segments, ids, and blocks of other prompts, that wait to be stored in tiers."""
        return len(self.tier_writer) + len(self._id_records) + self.prefixes.num_waiting

    @property
    def num_to_store(self) -> int:
        """Segments and blocks still to be stored in tiers that outlive the server."""
        return self.num_waiting if self.tier_writer.outlives_server else 0

    def expire(self) -> None:
        """Drops expired segments."""
        self.manager.expire()

    async def known_ids(self, namespace: str, wanted: Iterable[str]) -> ChunkIds:
        """The registered chunk ids, without those of expired chunks; ``wanted`` ones are looked for in the tiers."""
        self.manager.expire()
        await self._id_records.recall(namespace, wanted)
        return self.manager.ids

    def is_crowded(self) -> bool:
        """Whether as many fills wait as may wait."""
        return self.fills.is_crowded

    def layout(self, prompt: ChunkedPrompt, strategy: PositionStrategy) -> Layout:
        """The place of each of the prompt's segments."""
        return self._reindexer.layout(prompt, strategy)

    @property
    def num_free_pages(self) -> int:
        """Pages that hold nothing."""
        return self.manager.pool.num_free

    def look_up(self, prompt: ChunkedPrompt, scope: CacheScope) -> Lookup:
        """The prompt's segments, found or missing; changes nothing."""
        return self.manager.look_up(prompt, scope)

    def fit(self, prompt: ChunkedPrompt, scope: CacheScope, links: Sequence[Place]) -> Fit:
        """How the pool can hold the prompt's segments and links; changes nothing.

        Raises :class:`FullAttentionError` if it can't.
        """
        try:
            return self.manager.fit(self.manager.look_up(prompt, scope), scope.owner, links)
        except CapacityError as error:
            raise FullAttentionError("capacity", str(error)) from error

    def lease(self, fit: Fit, layout: Layout) -> Lease:
        """Leases the segments of ``fit``, which must be the cache's state now."""
        return self.manager.lease(fit, layout)

    def borrow_links(self, prompt: ChunkedPrompt, places: Sequence[Place], scope: CacheScope) -> Lease:
        """A lease on pages for link tokens; raises :class:`FullAttentionError`."""
        try:
            return self.manager.borrow(link_identities(prompt, places, scope), places)
        except CapacityError as error:
            raise FullAttentionError("capacity", str(error)) from error

    def start_fills(
        self,
        lease: Lease,
        request_id: str,
        cache_salt: str | None,
        documents: Mapping[ChunkKVCache, DocumentKey],
        **generate_kwargs: Any,
    ) -> list[FillTask]:
        """Starts the lease's fills; see :meth:`FillRunner.start`."""
        return self.fills.start(lease, request_id, cache_salt, documents, **generate_kwargs)

    async def wait(self, lease: Lease, own: Sequence[FillTask]) -> list[FillResult]:
        """Waits until the leased segments can be loaded, and scored; see :meth:`FillRunner.wait`."""
        results = await self.fills.wait(lease, own)
        await self.represent(lease)
        return results

    async def represent(self, lease: Lease) -> None:
        """Lets the workers score the leased chunks, on servers with sparse requests.

        Raises :class:`FullAttentionError`.
        """
        if self.representations is not None:
            await self.representations.add(segment.entry for segment in lease.chunks)

    async def link(self, lease: Lease, links: Lease, requests: LinkRequests) -> list[FillResult]:
        """Computes ``links`` behind the segments of ``lease``; raises :class:`FullAttentionError`."""
        return await self._linker.link(lease, links, requests)

    def name(self, documents: Mapping[ChunkKVCache, DocumentKey]) -> None:
        """Publishes segments, which can be loaded, under the registry's keys."""
        for entry, key in documents.items():
            self.manager.name(key, entry)

    def release(self, lease: Lease) -> None:
        """Ends a lease, and aborts fills without another lease."""
        self.fills.release(lease)
        self._check_if_idle()

    async def forget_refused(self, lease: Lease, request_id: str) -> bool:
        """Drops segments that a worker refused to load; the next request fills them again.

        False if there are none: the engine's error has another cause.
        """
        tags = [segment.tag for segment in lease.segments]
        by_worker: Sequence[Iterable[int]] = await self._llm.collective_rpc("chunk_cache_refused_tags", args=(tags,))
        refused = set[int]().union(*by_worker)
        if not refused:
            return False
        self.metrics.refused_loads += 1
        logger.error("request %s: a worker refused to load cached chunks; recomputing", request_id)
        for segment in lease.segments:
            if segment.tag in refused:
                self.manager.detach(segment.entry, Removal.REFUSED)
        return True

    def clear(self, namespace: str | None = None, why: Removal = Removal.CLEARED) -> list[ChunkHash]:
        """Drops all segments (of ``namespace``, if given) from the pool; returns their keys."""
        if self.representations is not None:
            self.representations.clear(namespace)
        return self.manager.clear(namespace, why)

    async def drop_from_tiers(self, keys: Iterable[ChunkHash], namespace: str | None) -> None:
        """Drops segments, and all prefixes of ``namespace``, if given, from all tiers."""
        await self.tier_writer.drop(keys)
        await self._id_records.flush()
        await self.prefixes.drop(namespace)

    async def stop_sharing(self) -> None:
        """Stores and shares nothing from now on: the weights may have changed."""
        if self.transfers is not None:
            logger.warning("chunks are no longer stored nor shared: the weights may have changed")
            await self.prefixes.stop()
            self.transfers = None

    def check_integrity(self) -> None:
        """Checks the manager's books; turns the cache off for good if they are wrong."""
        started = time.monotonic()
        try:
            self.manager.check_integrity()
        except IntegrityError as error:
            self.reason = f"integrity check failed: {error}"
            logger.critical("chunk cache disabled: %s", self.reason)
        ended = time.monotonic()
        self._next_integrity_check = ended + max(1.0, 100 * (ended - started))

    def _check_if_idle(self) -> None:
        """Checks the books of an idle manager, in at most 1 % of the time."""
        if time.monotonic() >= self._next_integrity_check and self.manager.is_idle:
            self.check_integrity()
