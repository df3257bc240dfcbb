# SPDX-License-Identifier: Apache-2.0
"""``GET /v1/cache/stats``."""

from types import SimpleNamespace

from app.routes.cache import router
from cache.config import ChunkCacheConfig
from cache.manager import ChunkCacheManager
from cache.positions.strategy import UNKNOWN
from engine_ext.chunks.cache_off import CacheOff
from tests.app.helpers import cache_with
from tests.cache.helpers import acquire
from tests.support.context import client_with


async def stats(cache, query=""):
    engine = SimpleNamespace(cache=cache, strategy=UNKNOWN, decode_budget=None)
    async with client_with(router, engine_client=engine) as client:
        return (await client.get(f"/v1/cache/stats{query}")).json()


async def test_a_cache_that_is_off_says_why():
    reason = "switched off by --chunk-cache off"
    assert await stats(CacheOff(reason)) == {"enabled": False, "reason": reason}


async def test_a_running_cache_shows_its_state_and_checks_its_books():
    manager = ChunkCacheManager(ChunkCacheConfig(8, 4, "engine", page_bytes=1000))
    lease = acquire(manager, (3, 4, 5, 6, 7), system=(1, 2))
    manager.retain(lease.chunks[0].entry, pinned=True, expires_at=None)
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
    assert shown["tiers"] == {"pool": {"bytes_total": 8000, "bytes_used": 3000, "bytes_pinned": 2000}}
    assert shown["counters"] == manager.metrics.snapshot()
    counted = {"lookups", "requests", "full_reasons", "tokens", "fills", "handovers", "fetches", "fetched_bytes"}
    assert shown["counters"].keys() == counted | {"tiers", "loaded_bytes", "removals", "refused_loads"}
    assert {name: each for name, each in shown["counters"].items() if each} == {"lookups": {"filled": 1}}
    assert cache.checks == [1]
    assert await stats(cache, "?check=false") == shown
    assert cache.checks == [1]  # who asks all the time may do without the check
