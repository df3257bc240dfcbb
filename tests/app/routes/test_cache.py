# SPDX-License-Identifier: Apache-2.0
"""``GET /v1/cache/stats``."""

from types import SimpleNamespace

from fastapi import FastAPI
from httpx import ASGITransport, AsyncClient

from app.routes.cache import router
from cache.config import ChunkCacheConfig
from cache.manager import ChunkCacheManager
from cache.positions.strategy import UNKNOWN
from engine_ext.chunks.cache_off import CacheOff
from tests.app.helpers import cache_with
from tests.cache.helpers import acquire


async def stats(cache, query=""):
    app = FastAPI()
    app.include_router(router)
    app.state.engine_client = SimpleNamespace(cache=cache, strategy=UNKNOWN, decode_budget=None)
    async with AsyncClient(transport=ASGITransport(app), base_url="http://server") as client:
        return (await client.get(f"/v1/cache/stats{query}")).json()


async def test_a_cache_that_is_off_says_why():
    reason = "switched off by --chunk-cache off"
    assert await stats(CacheOff(reason)) == {"enabled": False, "reason": reason}


async def test_memory_in_use_and_pinned_is_told_in_bytes():
    manager = ChunkCacheManager(ChunkCacheConfig(8, 4, "engine", page_bytes=1000))
    lease = acquire(manager, (3, 4, 5, 6, 7), system=(1, 2))
    manager.retain(lease.chunks[0].entry, pinned=True, expires_at=None)
    shown = await stats(cache_with(manager))
    assert shown["tiers"]["pool"] == {"bytes_total": 8000, "bytes_used": 3000, "bytes_pinned": 2000}


async def test_a_running_cache_shows_its_state_and_checks_its_books():
    manager = ChunkCacheManager(ChunkCacheConfig(4, 16, "engine", page_bytes=8192))
    cache = cache_with(manager, running=2, queued=1)
    cache.placement = "in-place"
    shown = await stats(cache)
    assert (shown["enabled"], shown["reason"]) == (True, None)
    assert (shown["placement"], shown["position_strategy"]) == ("in-place", "offset")
    assert shown["occupancy"] == manager.occupancy() | {
        "running_fills": 2,
        "queued_fills": 1,
        "registered_ids": 0,
        "segments_in_tiers_only": 0,
        "archive_waiting": 0,
    }
    assert shown["tiers"] == {"pool": {"bytes_total": 4 * 8192, "bytes_used": 0, "bytes_pinned": 0}}
    assert shown["counters"] == manager.metrics.snapshot()
    assert cache.checks == [1]


async def test_who_asks_all_the_time_may_do_without_the_check():
    cache = cache_with(ChunkCacheManager(ChunkCacheConfig(4, 16, "engine")))
    assert await stats(cache, "?check=false") == await stats(cache)
    assert cache.checks == [1]
