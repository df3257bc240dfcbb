# SPDX-License-Identifier: Apache-2.0
"""``/v1/cache``: state of the chunk cache, clearing, sleep."""

from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, Field

from app.http.answers import CacheStats, Cleared, Slept
from app.http.openapi import answers
from app.routes.dependencies import Engine, Tiers
from cache.config import ChunkCacheConfig
from engine_ext.chunks.cache_off import CacheOff
from engine_ext.chunks.chunk_cache import ChunkCache
from engine_ext.client.engine import ChunkEngine

router = APIRouter(prefix="/v1/cache", tags=["Chunk cache"])


@router.get(
    "/stats", summary="State and counters of the chunk cache", response_model=None, responses=answers(CacheStats)
)
async def stats(
    engine: Engine,
    check: Annotated[
        bool, Query(description="also check the cache's books; takes time in proportion to the pool's pages")
    ] = True,
) -> dict[str, Any]:
    """Whether the cache is on, or why not; its contents and its counters.

    The request also checks the cache's books: a defect turns the cache off and is the reason given here. Clients that
    poll may skip the check (``?check=false``): the books are also checked whenever the cache is idle.
    """
    return cache_stats(engine, is_checked=check)


class ClearRequest(BaseModel):
    """Segments to drop."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"example": {"namespace": "default"}})

    namespace: str | None = Field(None, description="only this namespace; default: everything")


@router.post(
    "/clear",
    summary="Empty the chunk cache",
    response_model=None,
    responses=answers(Cleared, HTTPStatus.SERVICE_UNAVAILABLE),
)
async def clear(engine: Engine, body: ClearRequest | None = None) -> dict[str, int]:
    """Drops every segment in the pool, pinned ones too; from all tiers as well, with the prefixes of prompts there.

    Running requests keep their segments until they end. Segments that are in tiers only stay there.
    """
    namespace = body.namespace if body else None
    keys = engine.cache.clear(namespace)
    await engine.cache.drop_from_tiers(keys, namespace)
    return {"cleared": len(keys)}


class SleepRequest(BaseModel):
    """Segments to take out of the pool."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"example": {"idle_s": 600}})

    idle_s: float = Field(
        600, ge=0, strict=True, allow_inf_nan=False, description="only segments that were not used for so many seconds"
    )


@router.post(
    "/sleep",
    summary="Take cold chunks out of the pool that are in a tier",
    response_model=None,
    responses=answers(Slept, HTTPStatus.CONFLICT, HTTPStatus.SERVICE_UNAVAILABLE),
)
async def sleep(tiers: Tiers, body: SleepRequest | None = None) -> dict[str, int]:
    """Requests for them, and ``POST /v1/rag/chunks``, load them again. Pinned chunks stay."""
    segments, pages = tiers.sleep_cold((body or SleepRequest()).idle_s)
    return {"segments": segments, "pages": pages}


def cache_stats(engine: ChunkEngine, *, is_checked: bool = True) -> dict[str, Any]:
    """The JSON of ``GET /v1/cache/stats``."""
    cache = engine.cache
    if isinstance(cache, CacheOff):
        return {"enabled": False, "reason": cache.reason}
    if is_checked:
        cache.check_integrity()
    return {
        "enabled": cache.reason is None,
        "reason": cache.reason,
        "placement": cache.placement,
        "measures_attention": cache.no_attention is None,
        "decode_budget": engine.decode_budget,
        "position_strategy": engine.strategy.strategy,
        **_contents(cache),
    }


def _contents(cache: ChunkCache) -> dict[str, Any]:
    manager, fills, metrics, tier_writer = cache.manager, cache.fills, cache.metrics, cache.tier_writer
    occupancy, held = manager.occupancy(), metrics.tier_bytes
    return {
        "occupancy": {
            **occupancy,
            "running_fills": fills.num_running,
            "queued_fills": fills.num_queued,
            "registered_ids": len(manager.ids),
            "segments_in_tiers_only": len(manager.away),
            "archive_waiting": cache.num_waiting,
        },
        "tiers": {
            "pool": _pool_bytes(occupancy, cache.config),
            **{
                name: {"bytes_total": size, "bytes_used": held.get(name, 0)} for name, size in tier_writer.tiers.items()
            },
        },
        "counters": metrics.snapshot(),
    }


def _pool_bytes(occupancy: dict[str, int], config: ChunkCacheConfig) -> dict[str, int]:
    """The pool's memory, on all workers together."""
    page_bytes = config.page_bytes
    return {
        "bytes_total": occupancy["pages_total"] * page_bytes,
        "bytes_used": (occupancy["pages_total"] - occupancy["pages_free"]) * page_bytes,
        "bytes_pinned": occupancy["pages_pinned"] * page_bytes,
    }
