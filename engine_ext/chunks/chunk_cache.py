# SPDX-License-Identifier: Apache-2.0
"""The chunk cache of one engine: what the pool holds, and the fill requests that compute what it lacks."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from vllm.v1.engine.async_llm import AsyncLLM

from cache.config import ChunkCacheConfig
from cache.costs import Costs
from cache.errors import CapacityError, FullAttentionError, IntegrityError
from cache.eviction.quotas import Quota, unlimited
from cache.eviction.removal import Removal
from cache.lease import ChunkStatus, FillJob, Lease
from cache.manager import ChunkCacheManager
from cache.positions.layout import Place, PlacementName, PositionReindexer
from cache.segments.chunk_ids import ChunkIds
from cache.segments.hashing import ChunkHash
from cache.segments.holdings import DocumentKey
from cache.segments.index import ChunkKVCache, EntryState, SegmentIdentity, now
from engine_ext.chunks.id_records import IdRecords
from engine_ext.chunks.prefill import NotSavedError, run_prefill
from engine_ext.chunks.prefixes import Prefixes
from engine_ext.chunks.source import ChunkSource, SourceResult
from engine_ext.chunks.tier_source import TierSource, note_events
from engine_ext.chunks.tier_writer import TierWriter
from engine_ext.chunks.transfers import PoolTransfers
from engine_ext.chunks.turns import FairTurns
from engine_ext.wire.plan import TransferPlan
from machine.beside import beside

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

logger = logging.getLogger(__name__)


class FillError(FullAttentionError):
    """A fill that the request waited for did not save its KV. Its entries are detached."""

    def __init__(self, message: str) -> None:
        super().__init__("fill failed", message)


@dataclass(frozen=True, slots=True)
class FillResult:
    """Tokens computed in one fill request: in all, and in the saved segments.

    Both are 0 if the segments came from ``source``.
    """

    num_computed: int
    num_computed_of_saved: int
    source: SourceResult | None = None


FillTask = asyncio.Task[FillResult]


@dataclass(frozen=True, slots=True)
class FillLimits:
    """Limits on fill requests in the engine, and on waiting ones."""

    max_running: int
    max_queued: int


_MOST_OWNERS: Final = 4
"""Owners whose fill queues may be full before others' are, too."""
FILL_LIMITS: Final = FillLimits(max_running=16, max_queued=1024)


class FillRunner:
    """Runs fill jobs as tasks that outlive the requests that started them.

    A fill is aborted only when no lease is left on its entries. ``on_computed`` is called with entries that other
    processes may store, ``on_end`` after each fill. ``adapter`` runs where a chunk's own tokens are computed, unless
    the request has an adapter of its own.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        manager: ChunkCacheManager,
        limits: FillLimits,
        costs: Costs,
        sources: Iterable[ChunkSource],
        adapter: "LoRARequest | None" = None,
        *,
        on_computed: Callable[[Iterable[ChunkKVCache]], None],
        on_end: Callable[[], None],
    ) -> None:
        self._llm = llm
        self._manager = manager
        self._costs = costs
        self._sources = list(sources)
        self._adapter = adapter
        self._on_computed = on_computed
        self._on_end = on_end
        self._turns = FairTurns(limits.max_running)
        self._of_owners: Counter[str] = Counter()
        self._max_queued = limits.max_queued
        self.num_running = 0
        self._tasks: dict[FillJob, FillTask] = {}
        self._jobs: dict[ChunkKVCache, FillJob] = {}

    @contextmanager
    def also_from(self, source: ChunkSource) -> Iterator[None]:
        """Asks ``source``, too, for missing segments within the context, after all other sources."""
        self._sources.append(source)
        try:
            yield
        finally:
            self._sources.remove(source)

    def start(
        self,
        lease: Lease,
        request_id: str,
        cache_salt: str | None,
        documents: Mapping[ChunkKVCache, DocumentKey],
        **generate_kwargs: Any,
    ) -> list[FillTask]:
        """Starts the lease's fill jobs; they go to the engine together, which batches them.

        A fill ends in :meth:`_ended`, which updates the manager. ``documents`` has the registry's keys of the entries.
        """
        tasks = []
        for i, job in enumerate(lease.fills):
            fill = self._fill(job, documents, f"{request_id}-fill-{i}", cache_salt, generate_kwargs)
            task = asyncio.create_task(fill, name=f"{request_id}-fill-{i}")
            # Runs before any waiter wakes, and also for a task cancelled before its first step.
            task.add_done_callback(partial(self._ended, job))
            self._tasks[job] = task
            self._of_owners[job.entries[0].owner] += 1
            self._jobs.update(dict.fromkeys(job.entries, job))
            tasks.append(task)
        return tasks

    async def wait(self, lease: Lease, own: Sequence[FillTask]) -> list[FillResult]:
        """Waits until every leased segment can be loaded; returns the results of ``own``, which the lease started.

        Raises :class:`FillError`.
        """
        entries = [segment.entry for segment in lease.segments]
        pending = {self._tasks[self._jobs[entry]] for entry in entries if entry in self._jobs}
        pending.update(own)
        if pending:
            await asyncio.wait(pending)
        if any(entry.state is not EntryState.READY for entry in entries):
            errors = [e for task in pending if not task.cancelled() and (e := task.exception()) is not None]
            raise FillError(f"a fill request failed: {errors[0]!r}" if errors else "a fill request was aborted")
        return [task.result() for task in own]

    def abort_unwanted(self, lease: Lease) -> None:
        """Aborts the fills of a lease that has ended, if no other lease waits for them."""
        jobs = {self._jobs[segment.entry] for segment in lease.segments if segment.entry in self._jobs}
        for job in jobs:
            # A fill that has ended is not aborted: its segments can be found.
            if not job.is_wanted and not self._tasks[job].done():
                for entry in job.entries:
                    self._manager.detach(entry, Removal.FILL_FAILED)
                self._tasks[job].cancel()

    @property
    def num_queued(self) -> int:
        """Fills that wait for their turn."""
        return len(self._tasks) - self.num_running

    def is_crowded(self, owner: str | None) -> bool:
        """Whether the fill queue is full for an owner; ``None`` is nobody in particular, where there are no keys."""
        if owner is None:
            return self.num_queued >= self._max_queued
        shares = sum(min(number, self._max_queued) for number in self._of_owners.values())
        return self._of_owners[owner] >= self._max_queued or shares >= _MOST_OWNERS * self._max_queued

    async def _fill(
        self,
        job: FillJob,
        documents: Mapping[ChunkKVCache, DocumentKey],
        request_id: str,
        cache_salt: str | None,
        generate_kwargs: dict[str, Any],
    ) -> FillResult:
        found: SourceResult | None = None
        for source in [] if job.is_private else self._sources:
            found = await source.fetch(job, documents) or found
            if found is not None and found.status is not ChunkStatus.FILLED:
                return FillResult(0, 0, found)
        computed = await self._compute(job, request_id, cache_salt, generate_kwargs)
        return replace(computed, source=found)

    async def _compute(
        self, job: FillJob, request_id: str, cache_salt: str | None, generate_kwargs: dict[str, Any]
    ) -> FillResult:
        await self._end_of_prefix(job)
        async with self._turns.turn(job.entries[0].owner):
            self.num_running += 1
            started = time.perf_counter()
            try:
                num_computed = await self._run(job, request_id, cache_salt, generate_kwargs)
            finally:
                self.num_running -= 1
        seconds = time.perf_counter() - started
        self._manager.metrics.fill_seconds.observe(seconds)
        if num_computed:
            self._costs.computing.observe(num_computed, seconds)
        # The last tokens that were computed are the job's own.
        return FillResult(num_computed, min(num_computed, job.num_tokens))

    async def _run(self, job: FillJob, request_id: str, cache_salt: str | None, generate_kwargs: dict[str, Any]) -> int:
        """Runs the job's requests; returns the tokens that were computed."""
        prefix, identity = job.prefix if job.has_prefix else None, job.entries[-1].identity
        salt = self._manager.hasher.adapted_salt(identity.scope, identity.num_prefix_tokens)
        if job.chunk is None or salt is None:
            return await self._prefill(job, prefix, request_id, cache_salt, generate_kwargs)
        # What is before the chunk is the plain model's: it is computed in a request of its own.
        num_computed, adapted = 0, {**generate_kwargs, "lora_request": self._adapter}
        with ExitStack() as stack:
            if prefix is None and identity.prefix:
                before = FillJob(job.system, None) if job.system else stack.enter_context(self._borrowed(identity))
                num_computed = await self._prefill(before, None, f"{request_id}-prefix", cache_salt, generate_kwargs)
                if not job.system:  # which ends with the job
                    self._manager.fill_succeeded(before)
                (prefix,) = before.entries
            alone = FillJob(None, job.chunk, prefix)
            return num_computed + await self._prefill(alone, prefix, request_id, salt, adapted)

    @contextmanager
    def _borrowed(self, identity: SegmentIdentity) -> Iterator[FillJob]:
        """Pages for the tokens before a segment, within the context; raises :class:`FillError`."""
        before = SegmentIdentity(identity.scope, b"", identity.prefix)
        try:
            with self._manager.borrowed([before], [Place(0, before.num_tokens, 0, 0)]) as lease:
                yield lease.fills[0]
        except CapacityError as error:
            raise FillError(str(error)) from error

    async def _prefill(
        self,
        job: FillJob,
        prefix: ChunkKVCache | None,
        request_id: str,
        cache_salt: str | None,
        generate_kwargs: dict[str, Any],
    ) -> int:
        """Runs one request behind ``prefix``, if given; returns the tokens that it computed."""
        # A prefix without a lease may be evicted before the engine loads it. Then its pages have other tags: the
        # load is refused, and the fill fails.
        plan, prompt_ids = TransferPlan.for_fill(job, prefix), job.prompt_ids
        try:
            output = await run_prefill(self._llm, prompt_ids, plan, request_id, cache_salt, **generate_kwargs)
        except NotSavedError as error:
            if prefix is not None and prefix.state is EntryState.READY:
                self._manager.detach(prefix, Removal.REFUSED)  # perhaps it was not there
            raise FillError(str(error)) from error
        return len(prompt_ids) - (output.num_cached_tokens or 0)

    async def _end_of_prefix(self, job: FillJob) -> None:
        """Waits for the job that computes the prefix."""
        if (other := self._jobs.get(job.prefix) if job.prefix else None) is not None:
            await asyncio.wait([self._tasks[other]])

    def _ended(self, job: FillJob, task: FillTask) -> None:
        del self._tasks[job]
        self._of_owners -= Counter((job.entries[0].owner,))  # keeps no zeros
        for entry in job.entries:
            del self._jobs[entry]
        if task.cancelled():
            self._manager.fill_failed(job, "aborted")
        elif task.exception() is not None:
            self._manager.fill_failed(job)
        else:
            source = task.result().source
            status = source.status if source is not None else ChunkStatus.FILLED
            self._manager.fill_succeeded(job, "succeeded" if status is ChunkStatus.FILLED else status)
            if status is not ChunkStatus.LOADED and not job.is_private:
                self._on_computed(job.entries)
        self._on_end()


class ChunkCache:
    """The cached segments, their fills, sources and tiers.

    ``adapter`` runs where chunks are computed; ``reindexer`` places the segments of requests. ``transfers`` is ``None``
    if KV must not leave this process. ``tiers`` maps the tiers' names, the fastest first, to their sizes on all workers
    together. ``no_attention`` is the reason why attention to chunks in the pool can't be computed, if any. ``quota_of``
    gives an owner's quota.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        config: ChunkCacheConfig,
        limits: FillLimits = FILL_LIMITS,
        *,
        adapter: "LoRARequest | None" = None,
        transfers: PoolTransfers | None = None,
        tiers: Mapping[str, int] = MappingProxyType({}),
        reindexer: PositionReindexer | None = None,
        no_attention: str | None = None,
        quota_of: Callable[[str], Quota] = unlimited,
        clock: Callable[[], float] = now,
    ) -> None:
        self.reason: str | None = None
        """The reason why the cache is disabled; ``None`` while it is usable."""
        self.transfers, self.no_attention = transfers, no_attention
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
        keeps_prefixes = transfers is not None and transfers.keeps_prefixes
        self.prefixes = Prefixes(self.metrics, lambda: self.transfers) if keeps_prefixes else None
        from_tiers = [TierSource(list(tiers), self.manager, lambda: self.transfers, self.costs)] if tiers else []
        self.fills = FillRunner(
            llm,
            self.manager,
            limits,
            self.costs,
            from_tiers,
            adapter,
            on_computed=self.tier_writer.add,
            on_end=self._check_if_idle,
        )
        self._llm = llm
        self.reindexer = reindexer or PositionReindexer()
        self._num_changes_checked = 0
        self._next_integrity_check = 0.0

    def running(self) -> AbstractAsyncContextManager[None]:
        """Exports segments, ids and prefixes to the tiers within the context, if there are tiers."""
        if not self.tier_writer.tiers:
            return nullcontext()
        runs = [self.tier_writer.run(), self._id_records.run(), *([self.prefixes.run()] if self.prefixes else [])]
        return beside(*runs)

    def usable(self) -> "ChunkCache":
        """This cache; raises :class:`FullAttentionError` if its books were found wrong."""
        if self.reason is not None:
            raise FullAttentionError("cache off", self.reason)
        return self

    def check_attention(self) -> None:
        """Raises :class:`FullAttentionError` if attention to chunks in the pool can't be measured."""
        if self.no_attention is not None:
            raise FullAttentionError("attention", f"the attention to chunks can't be measured: {self.no_attention}")

    @property
    def placement(self) -> PlacementName:
        """How requests get their chunks."""
        return self.reindexer.placement

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
        num_blocks = self.prefixes.num_waiting if self.prefixes else 0
        return len(self.tier_writer) + len(self._id_records) + num_blocks

    @property
    def num_to_store(self) -> int:
        """Segments and blocks still to be stored in tiers that outlive the server."""
        return self.num_waiting if self.tier_writer.outlives_server else 0

    async def known_ids(self, namespace: str, wanted: Iterable[str]) -> ChunkIds:
        """The registered chunk ids, without those of expired chunks; ``wanted`` ones are looked for in the tiers."""
        self.manager.expire()
        await self._id_records.recall(namespace, wanted)
        return self.manager.ids

    def is_crowded(self, owner: str | None = None) -> bool:
        """Whether the fill queue is full; with keys, for a tenant."""
        return self.fills.is_crowded(owner)

    def name(self, documents: Mapping[ChunkKVCache, DocumentKey]) -> None:
        """Publishes segments, which can be loaded, under the registry's keys."""
        for entry, key in documents.items():
            self.manager.name(key, entry)

    async def file(self, key: ChunkHash, part: int) -> memoryview | None:
        """A part of a segment in the pool or in tiers, for other replicas; ``None`` if it is nowhere."""
        if self.transfers is None:
            return None
        if (lease := self.manager.hold(key)) is not None:
            try:
                return await self.transfers.read(lease.chunks[0].entry, part)
            finally:
                self.release(lease)
        if (entry := self.manager.away.get(key)) is None:
            return None
        answer, file = await self.transfers.read_stored(entry, part)
        note_events(self.metrics, [replace(answer, held={})])  # other workers hold bytes, too
        return file if answer.tier is not None else None

    def release(self, lease: Lease) -> None:
        """Ends a lease, and aborts fills without another lease."""
        self.manager.release(lease)
        self.fills.abort_unwanted(lease)
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
        return self.manager.clear(namespace, why)

    async def drop_from_tiers(self, keys: Iterable[ChunkHash], namespace: str | None) -> None:
        """Drops segments, and all prefixes of ``namespace``, if given, from all tiers."""
        await self.tier_writer.drop(keys)
        await self._id_records.flush(namespace)
        if self.prefixes is not None:
            await self.prefixes.drop(namespace)

    async def stop_sharing(self) -> None:
        """Stores and shares nothing from now on: the weights may have changed."""
        if self.transfers is not None:
            logger.warning("chunks are no longer stored nor shared: the weights may have changed")
            if self.prefixes is not None:
                await self.prefixes.stop()
            self.transfers = None

    def check_integrity(self) -> None:
        """Checks the manager's books; turns the cache off for good if they are wrong."""
        started, self._num_changes_checked = time.monotonic(), self.manager.pool.num_changes
        try:
            self.manager.check_integrity()
        except IntegrityError as error:
            self.reason = f"integrity check failed: {error}"
            logger.critical("chunk cache disabled: %s", self.reason)
        ended = time.monotonic()
        self._next_integrity_check = ended + max(1.0, 100 * (ended - started))

    def _check_if_idle(self) -> None:
        """Checks the books of an idle manager whose pages have changed hands, in at most 1 % of the time."""
        has_changed = self.manager.pool.num_changes != self._num_changes_checked
        if has_changed and time.monotonic() >= self._next_integrity_check and self.manager.is_idle:
            self.check_integrity()
