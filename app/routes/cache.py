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
from cache.hashing import ChunkHash
from cache.manager import ChunkCacheManager
from engine_ext.chunks.fills import FillRunner
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
    """Drops every segment in the pool, pinned ones too; from all tiers as well.

    Running requests keep their segments until they end. Segments that are in tiers only stay there.
    """
    keys = _cleared(engine.manager, body.namespace if body else None)
    await engine.drop_from_tiers(keys)
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
    if engine.manager is not None and is_checked:
        engine.check_integrity()
    state: dict[str, Any] = {"enabled": engine.disabled_reason is None, "reason": engine.disabled_reason}
    if engine.manager is not None and engine.fills is not None:
        state["placement"] = engine.placement
        state["position_strategy"] = engine.strategy.strategy
        state |= _contents(engine.manager, engine.fills)
    return state


def _contents(manager: ChunkCacheManager, fills: FillRunner) -> dict[str, Any]:
    occupancy, metrics, archive = manager.occupancy(), manager.metrics, fills.archive
    sizes = archive.tiers if archive is not None else {}
    held = metrics.tier_bytes
    return {
        "occupancy": {
            **occupancy,
            "running_fills": fills.num_running,
            "queued_fills": fills.num_queued,
            "registered_ids": len(manager.ids),
            "archive_waiting": len(archive or ()),
        },
        "tiers": {
            "pool": _pool_bytes(occupancy, manager.config),
            **{name: {"bytes_total": size, "bytes_used": held.get(name, 0)} for name, size in sizes.items()},
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


def _cleared(manager: ChunkCacheManager | None, namespace: str | None) -> list[ChunkHash]:
    return manager.clear(namespace) if manager is not None else []
