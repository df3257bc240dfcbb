# SPDX-License-Identifier: Apache-2.0
"""The state of the chunk cache."""

from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, ConfigDict, Field

from app.http.answers import CacheStats, Cleared, Slept, answers
from cache.manager import ChunkCacheManager
from engine_ext.chunks.chunk_cache import CacheOff
from engine_ext.client.engine import ChunkEngine
from engine_ext.wire.vllm_compat import GracefulHTTPError

router = APIRouter(prefix="/v1/cache", tags=["Chunk cache"])


@router.get(
    "/stats", summary="State and counters of the chunk cache", response_model=None, responses=answers(CacheStats)
)
async def stats(
    request: Request,
    check: Annotated[
        bool, Query(description="check the cache's books too; takes time in proportion to the pool's pages")
    ] = True,
) -> dict[str, Any]:
    """Whether the cache is on (and why not), what it holds, and what it has done since the start.

    Asking checks the cache's books as well: a defect in them would turn it off, with the reason given here. Those who
    ask all the time may do without (``?check=false``): the books are also checked whenever the cache is idle.
    """
    engine: ChunkEngine = request.app.state.engine_client
    return cache_stats(engine, is_checked=check)


class ClearRequest(BaseModel):
    """What to drop."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"example": {"namespace": "default"}})

    namespace: str | None = Field(None, description="only this namespace; default: everything")


@router.post(
    "/clear",
    summary="Empty the chunk cache",
    response_model=None,
    responses=answers(Cleared, HTTPStatus.SERVICE_UNAVAILABLE),
)
async def clear(request: Request, body: ClearRequest | None = None) -> dict[str, int]:
    """Drops every segment in the pool, pinned ones too, from the pool and from all tiers.

    Requests that run with them now keep them until they end. What is in tiers alone stays there.
    """
    engine: ChunkEngine = request.app.state.engine_client
    keys = engine.cache.clear(body.namespace if body else None)
    await engine.cache.drop_from_tiers(keys)
    return {"cleared": len(keys)}


class SleepRequest(BaseModel):
    """What to take out of the pool."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"example": {"idle_s": 600}})

    idle_s: float = Field(
        600, ge=0, strict=True, allow_inf_nan=False, description="only what was not used for so many seconds"
    )


@router.post(
    "/sleep",
    summary="Take cold chunks out of the pool that are in a tier",
    response_model=None,
    responses=answers(Slept, HTTPStatus.CONFLICT, HTTPStatus.SERVICE_UNAVAILABLE),
)
async def sleep(request: Request, body: SleepRequest | None = None) -> dict[str, int]:
    """They are loaded again when they are asked about, or by ``POST /v1/rag/chunks``. Pinned chunks stay."""
    engine: ChunkEngine = request.app.state.engine_client
    cache = engine.cache
    if isinstance(cache, CacheOff) or not cache.tier_writer.tiers:
        raise GracefulHTTPError("there are no tiers (--chunk-cache-tiers)", HTTPStatus.CONFLICT)
    segments, pages = cache.tier_writer.sleep_cold((body or SleepRequest()).idle_s)
    return {"segments": segments, "pages": pages}


def cache_stats(engine: ChunkEngine, *, is_checked: bool = True) -> dict[str, Any]:
    """The JSON of ``GET /v1/cache/stats``."""
    cache = engine.cache
    if isinstance(cache, CacheOff):
        return {"enabled": False, "reason": cache.reason}
    if is_checked:
        cache.check_integrity()
    held = cache.metrics.tier_bytes
    return {
        "enabled": cache.reason is None,
        "reason": cache.reason,
        "placement": cache.placement,
        "position_strategy": engine.strategy.strategy,
        "occupancy": {
            **cache.manager.occupancy(),
            "running_fills": cache.fills.num_running,
            "queued_fills": cache.fills.num_queued,
            "registered_ids": len(cache.manager.ids),
            "archive_waiting": len(cache.tier_writer),
        },
        "tiers": {
            "pool": _pool_bytes(cache.manager),
            **{
                name: {"bytes_total": size, "bytes_used": held.get(name, 0)}
                for name, size in cache.tier_writer.tiers.items()
            },
        },
        "counters": cache.metrics.snapshot(),
    }


def _pool_bytes(manager: ChunkCacheManager) -> dict[str, int]:
    """The pool's memory, on all workers together."""
    occupancy, page_bytes = manager.occupancy(), manager.config.page_bytes
    return {
        "bytes_total": occupancy["pages_total"] * page_bytes,
        "bytes_used": (occupancy["pages_total"] - occupancy["pages_free"]) * page_bytes,
        "bytes_pinned": occupancy["pages_pinned"] * page_bytes,
    }
