# SPDX-License-Identifier: Apache-2.0
"""``GET /v1/cache/stats``."""

from types import SimpleNamespace

from fastapi import FastAPI
from httpx import ASGITransport, AsyncClient

from app.routes.cache import router
from cache.config import ChunkCacheConfig
from cache.manager import ChunkCacheManager


async def stats(**engine):
    app = FastAPI()
    app.include_router(router)
    app.state.engine_client = SimpleNamespace(**engine)
    async with AsyncClient(transport=ASGITransport(app), base_url="http://server") as client:
        return (await client.get("/v1/cache/stats")).json()


async def test_a_cache_that_is_off_says_why():
    reason = "switched off by --no-chunk-cache"
    assert await stats(manager=None, fills=None, disabled_reason=reason) == {
        "enabled": False,
        "reason": reason,
    }


async def test_a_running_cache_shows_its_state_and_checks_its_books():
    manager, checks = ChunkCacheManager(ChunkCacheConfig(4, 16, "engine")), []
    shown = await stats(
        manager=manager,
        fills=SimpleNamespace(num_running=2, num_queued=1, archive=None),
        disabled_reason=None,
        check_integrity=lambda: checks.append(1),
    )
    assert (shown["enabled"], shown["reason"]) == (True, None)
    assert shown["occupancy"] == manager.occupancy() | {
        "running_fills": 2,
        "queued_fills": 1,
        "registered_ids": 0,
        "archive_waiting": 0,
    }
    assert shown["counters"] == manager.metrics.snapshot()
    assert checks == [1]
