# SPDX-License-Identifier: Apache-2.0
"""Missing segments are loaded where that is quicker than computing, and given up where it turns out not to be."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from cache.config import ChunkCacheConfig
from cache.costs import Costs
from cache.lease import ChunkStatus
from cache.manager import ChunkCacheManager
from engine_ext.chunks.tier_source import TierSource
from engine_ext.chunks.transfers import TransferError
from engine_ext.wire.worker_messages import Answer
from tests.cache.helpers import PAGE_TOKENS, acquire, tokens

A = tokens(100, 4)


class FakeTransfers:
    """Answers with the events of one worker."""

    def __init__(self, tier: str | None, *events: tuple[str, str]) -> None:
        self.answer = Answer(tier=tier, num_bytes=100, events=list(events), held={"file": 100})
        self.limits: list[float] = []

    async def load(self, entry: Any, tiers: Any, limit_s: float) -> list[Answer]:
        self.limits.append(limit_s)
        return [self.answer]


def source(transfers: Any, costs: Costs, system: Sequence[int] = ()) -> tuple[TierSource, Any]:
    manager = ChunkCacheManager(ChunkCacheConfig(12, PAGE_TOKENS, "engine", page_bytes=100))
    (job, *_) = acquire(manager, A, system=system).fills
    return TierSource(["host", "file"], manager, lambda: transfers, costs), job


@pytest.mark.parametrize("is_computing_known", [False, True])
async def test_what_a_tier_has_is_loaded_and_known_to_be_in_the_faster_ones_too(is_computing_known: bool) -> None:
    """The first load tells the tier's pace, however long computing takes."""
    costs, transfers = Costs(), FakeTransfers("file", ("file", "loaded"))
    if is_computing_known:
        costs.computing.observe(4, 0.01)
    tiers, job = source(transfers, costs)
    found = await tiers.fetch(job, {})
    assert found is not None
    assert (found.status, found.origin) == (ChunkStatus.LOADED, "file")
    assert job.entries[0].tiers == ("host", "file")
    assert transfers.limits == [0.0]
    assert costs.loading["file"].seconds(100) is not None


class MeetingTransfers(FakeTransfers):
    """Ends no load before as many have begun as a job has segments; the first fails at once."""

    def __init__(self, expected: int, failed: int = 0) -> None:
        super().__init__("file", ("file", "loaded"))
        self._meeting = asyncio.Barrier(expected - failed)
        self._failing = failed
        self.ended = 0

    async def load(self, entry: Any, tiers: Any, limit_s: float) -> list[Answer]:
        if self._failing:
            self._failing -= 1
            raise TransferError("a worker can't")
        await self._meeting.wait()
        await asyncio.sleep(0)
        self.ended += 1
        return await super().load(entry, tiers, limit_s)


@pytest.mark.parametrize("failed", [0, 1])
async def test_a_chunk_and_the_system_prompt_before_it_load_at_once(failed: int) -> None:
    """A failed load waits for the others, whose pages are being written."""
    transfers = MeetingTransfers(2, failed)
    tiers, job = source(transfers, Costs(), system=tokens(1, 4))
    assert len(job.entries) == 2
    async with asyncio.timeout(10):
        found = await tiers.fetch(job, {})
    assert (found.status if found is not None else None) is (None if failed else ChunkStatus.LOADED)
    assert transfers.ended == 2 - failed


async def test_a_load_that_takes_longer_than_computing_is_given_up_and_computing_goes_first() -> None:
    costs = Costs()
    costs.computing.observe(4, 2.0)
    costs.loading["file"].observe(100, 0.1)
    transfers = FakeTransfers(None, ("file", "late"))
    tiers, job = source(transfers, costs)
    assert await tiers.fetch(job, {}) is None
    assert transfers.limits == [2.0]
    assert not costs.is_worth_loading("file", 4, 100)
    costs.loading["host"].observe(1, 100.0)
    found = await tiers.fetch(job, {})
    assert found is not None
    assert found.status is ChunkStatus.FILLED
    assert transfers.limits == [2.0]
