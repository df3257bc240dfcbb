# SPDX-License-Identifier: Apache-2.0
"""Fill requests: compute missing segments, once for all requests that wait for them."""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from vllm.v1.engine.async_llm import AsyncLLM

from cache.costs import Costs
from cache.eviction.removal import Removal
from cache.lease import ChunkStatus, FillJob, Lease
from cache.manager import ChunkCacheManager
from cache.segments.holdings import DocumentKey
from cache.segments.index import ChunkKVCache, EntryState
from engine_ext.chunks.prefill import NotSavedError, run_prefill
from engine_ext.chunks.source import ChunkSource, SourceResult
from engine_ext.wire.plan import TransferPlan
from engine_ext.wire.request import FullAttentionError


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


FILL_LIMITS: Final = FillLimits(max_running=16, max_queued=1024)


class FillRunner:
    """Runs fill jobs as tasks that outlive the requests that started them.

    A fill is aborted only when no lease is left on its entries. ``on_computed`` is called with entries that other
    processes may store, ``on_end`` after each fill.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        manager: ChunkCacheManager,
        limits: FillLimits,
        costs: Costs,
        sources: Iterable[ChunkSource],
        *,
        on_computed: Callable[[Iterable[ChunkKVCache]], None],
        on_end: Callable[[], None],
    ) -> None:
        self._llm = llm
        self._manager = manager
        self._costs = costs
        self._sources = list(sources)
        self._on_computed = on_computed
        self._on_end = on_end
        self._turns = asyncio.Semaphore(limits.max_running)
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

    def release(self, lease: Lease) -> None:
        """Ends the lease and aborts fills without another lease."""
        self._manager.release(lease)
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

    @property
    def is_crowded(self) -> bool:
        """Whether as many fills wait as may wait."""
        return self.num_queued >= self._max_queued

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
        async with self._turns:
            self.num_running += 1
            started = time.perf_counter()
            # A prefix without a lease may be evicted before the engine loads it. Then its pages have other tags: the
            # load is refused, and the fill fails.
            plan, prompt_ids = TransferPlan.for_fill(job, job.prefix if job.has_prefix else None), job.prompt_ids
            try:
                output = await run_prefill(self._llm, prompt_ids, plan, request_id, cache_salt, **generate_kwargs)
            except NotSavedError as error:
                if plan.loads and job.prefix is not None:
                    self._manager.detach(job.prefix, Removal.REFUSED)  # perhaps it was not there
                raise FillError(str(error)) from error
            finally:
                self.num_running -= 1
        seconds = time.perf_counter() - started
        self._manager.metrics.fill_seconds.observe(seconds)
        result = _result(job, len(prompt_ids) - (output.num_cached_tokens or 0))
        if result.num_computed:
            self._costs.computed(result.num_computed, seconds)
        return result

    async def _end_of_prefix(self, job: FillJob) -> None:
        """Waits for the job that computes the prefix."""
        if (other := self._jobs.get(job.prefix) if job.prefix else None) is not None:
            await asyncio.wait([self._tasks[other]])

    def _ended(self, job: FillJob, task: FillTask) -> None:
        del self._tasks[job]
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


def _result(job: FillJob, num_computed: int) -> FillResult:
    """Counts computed tokens from the end: the chunk's, then the system segment's."""
    return FillResult(num_computed, min(num_computed, job.num_tokens))
