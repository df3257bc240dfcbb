# SPDX-License-Identifier: Apache-2.0
"""A chunk cache is complete when built: filled segments go to the tiers, expired ones leave them, sources are asked."""

from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest

from cache.errors import FullAttentionError
from cache.lease import ChunkStatus
from cache.positions.layout import ChunkedPrompt, PositionStrategy
from engine_ext.chunks.cache_off import CacheOff
from engine_ext.chunks.chunk_cache import ChunkCache
from engine_ext.chunks.source import SourceResult
from engine_ext.client.engine import ChunkEngine
from engine_ext.client.request import CacheOptions
from tests.cache.helpers import find
from tests.engine_ext.fake_llm import FakeLLM, ask, chunk, make_cache, make_engine

PROMPT = ChunkedPrompt((1, 2, 3), (chunk(100, 4),), (9, 9))
TIERS = {"host": 1 << 20, "file": 1 << 20}


async def test_filled_segments_are_queued_for_the_tiers_if_any_and_expired_ones_dropped() -> None:
    engine, _ = make_engine(tiers=TIERS)
    cache, (chunk,) = engine.cache, PROMPT.chunks
    await ask(engine, PROMPT)
    assert len(cache.tier_writer) == cache.num_to_store == 2
    entry = find(cache.manager, chunk.token_ids)
    cache.manager.retain(entry, pinned=False, expires_at=cache.manager.clock())
    cache.manager.expire()
    assert cache.tier_writer._to_drop == {entry.key}
    engine, _ = make_engine()
    await ask(engine, PROMPT)
    assert len(engine.cache.tier_writer) == 0


async def test_a_source_is_asked_while_it_is_there() -> None:
    class Source:
        asked = 0

        async def fetch(self, job: Any, documents: Any) -> SourceResult | None:
            self.asked += 1
            return SourceResult(ChunkStatus.FILLED, why="it is not worth it")

    engine, source = make_engine()[0], Source()
    with engine.cache.fills.also_from(source):
        report = await ask(engine, PROMPT)
    assert (source.asked, report.chunks[0].why) == (1, "it is not worth it")
    engine.cache.clear()
    await ask(engine, PROMPT)
    assert source.asked == 1


async def test_what_is_computed_before_an_adapted_chunk_counts_as_computed() -> None:
    llm: Any = FakeLLM()
    config = replace(make_cache(llm).config, adapter="a")
    engine = ChunkEngine(llm, ChunkCache(llm, config, adapter=Mock()))
    context, given = chunk(50, 4).packed, chunk(100, 4)
    await ask(engine, replace(PROMPT, chunks=(replace(given, context=context),)))
    assert sorted(llm.computed) == [(1, 2, 3), (1, 2, 3, 50, 51, 52, 53), (100, 101, 102, 103)]
    assert dict(engine.cache.metrics.fills) == {"succeeded": 3}
    engine.cache.check_integrity()
    assert engine.cache.reason is None


async def test_text_that_is_computed_anyway_takes_nothing_of_the_windows() -> None:
    engine, _ = make_engine()
    text = replace(chunk(200, 8), is_text=True)
    prompt = ChunkedPrompt((1, 2), (chunk(100, 4), text, chunk(300, 8)), (9, 9))
    report = await ask(engine, prompt, CacheOptions(position_strategy=PositionStrategy.OFFSET, recompute=0.5))
    assert [(each.index, each.recomputed) for each in report.chunks if each.recomputed][-1:] == [(0, [(0, 4)])]


async def test_a_cache_that_is_off_holds_nothing_and_says_why() -> None:
    cache = CacheOff("switched off")
    assert await cache.known_ids("default", ["a"]) is None
    assert (cache.clear(), cache.is_crowded(), cache.num_to_store) == ([], False, 0)
    with pytest.raises(FullAttentionError, match="switched off"):
        cache.usable()
