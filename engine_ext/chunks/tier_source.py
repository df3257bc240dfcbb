# SPDX-License-Identifier: Apache-2.0
"""Missing segments from tiers, where that is quicker than to compute them."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from cache.costs import Costs
from cache.lease import ChunkStatus, FillJob
from cache.manager import ChunkCacheManager
from cache.metrics import ChunkCacheMetrics
from cache.segments.holdings import DocumentKey
from cache.segments.index import ChunkKVCache
from cache.tiers.memory import MemoryTier
from engine_ext.chunks.source import SourceResult
from engine_ext.chunks.transfers import PoolTransfers, TransferError
from engine_ext.wire.worker_messages import Answer

logger = logging.getLogger(__name__)

_LEAST_LIMIT_S: Final = 0.5
"""Time that a tier gets for a segment however quickly it could be computed."""


class TierSource:
    """A :class:`engine_ext.chunks.chunk_cache.ChunkSource` over tiers, named in their order, the fastest first.

    The first load is waited for, since nobody knows the tier's pace. Later ones that take longer than computing would
    are given up, and computing goes first for as long as the pace is remembered.
    """

    def __init__(
        self,
        names: Sequence[str],
        manager: ChunkCacheManager,
        transfers: Callable[[], PoolTransfers | None],
        costs: Costs,
    ) -> None:
        self._names = names
        self._manager = manager
        self._transfers = transfers
        self._costs = costs
        self._num_loading = 0

    async def fetch(self, job: FillJob, documents: Mapping[ChunkKVCache, DocumentKey]) -> SourceResult | None:
        """All of the job's segments or none, at once."""
        if (transfers := self._transfers()) is None:
            return None
        worth = {entry: self._worth(entry) for entry in job.entries}
        for entry, names in worth.items():
            if not names:
                return SourceResult(ChunkStatus.FILLED, why=self._why(entry.num_tokens, self._bytes(entry)))
        async with asyncio.TaskGroup() as group:  # waits for all: pages that are written must not be reused
            loads = [group.create_task(self._load(transfers, entry, names)) for entry, names in worth.items()]
        found = [number for load in loads if (number := load.result()) is not None]
        return SourceResult(ChunkStatus.LOADED, origin=self._names[max(found)]) if len(found) == len(loads) else None

    async def _load(self, transfers: PoolTransfers, entry: ChunkKVCache, worth: Sequence[str]) -> int | None:
        """Loads a segment; returns the number of the slowest tier that had a part, ``None`` if it is nowhere."""
        num_tokens, num_bytes = entry.num_tokens, self._bytes(entry)
        started, self._num_loading = time.perf_counter(), self._num_loading + 1
        at_once = self._num_loading
        computing = self._costs.computing.seconds(num_tokens)
        if computing is None or self._costs.loading[worth[-1]].seconds(num_bytes) is None:
            limit_s = 0.0  # the first load tells the pace
        else:
            # Fills of as many chunks would take their time one after the other.
            limit_s = max(_LEAST_LIMIT_S, at_once * computing)
        try:
            answers = await transfers.load(entry, worth, limit_s)
        except TransferError as error:
            logger.warning("can't import a chunk: %s", error)
            return None
        finally:
            at_once, self._num_loading = max(at_once, self._num_loading), self._num_loading - 1
        note_events(self._manager.metrics, answers)
        for late in {tier for answer in answers for tier, word in answer.events if word == "late"}:
            self._costs.loading[late].given_up(num_bytes, limit_s)
        tiers = {answer.tier for answer in answers}
        if None in tiers:
            return None
        last = max(self._names.index(str(tier)) for tier in tiers)
        seconds = time.perf_counter() - started
        # Loads at once share the time that they take; fills of as many chunks would add up.
        self._costs.loading[self._names[last]].observe(num_bytes, seconds / at_once)
        self._manager.metrics.tier_load_seconds.labels(self._names[last]).observe(seconds)
        # What was read from a tier is written to the faster ones.
        entry.tiers = tuple(self._names[: last + 1])
        return last

    def _worth(self, entry: ChunkKVCache) -> list[str]:
        """The tiers from which loading takes less time than computing."""
        num_bytes = self._bytes(entry)
        return [name for name in self._names if self._costs.is_worth_loading(name, entry.num_tokens, num_bytes)]

    def _bytes(self, entry: ChunkKVCache) -> int:
        return entry.num_pages * self._manager.config.page_bytes

    def _why(self, num_tokens: int, num_bytes: int) -> str:
        computing = self._costs.computing.seconds(num_tokens) or 0.0
        loading = {name: self._costs.loading[name].seconds(num_bytes) or 0.0 for name in self._names}
        tiers = ", ".join(f"{1e3 * seconds:.1f} ms from {name}" for name, seconds in loading.items())
        return f"computing takes {1e3 * computing:.1f} ms, loading {tiers}"


def note_events(metrics: ChunkCacheMetrics, answers: Iterable[Answer]) -> None:
    """Counts the tiers' events and bytes; workers share all tiers but host memory."""
    answers = list(answers)
    for tier in answers[0].held:
        held = [answer.held[tier] for answer in answers]
        metrics.tier_bytes[tier] = sum(held) if tier == MemoryTier.name else max(held)
    for answer in answers:
        for tier, word in answer.events:
            metrics.tier_events[tier, word] += 1
        if answer.tier is not None:
            metrics.loaded_bytes[answer.tier] += answer.num_bytes
