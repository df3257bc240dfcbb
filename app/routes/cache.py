# SPDX-License-Identifier: Apache-2.0
"""The state of the chunk cache."""

from typing import Any

from fastapi import APIRouter, Request

from engine_ext.engine import ChunkEngine

router = APIRouter(prefix="/v1/cache", tags=["Chunk cache"])


@router.get("/stats", summary="State and counters of the chunk cache")
async def stats(request: Request) -> dict[str, Any]:
    """Whether the cache is on (and why not), what it holds, and what it has done since the start.

    Asking checks the cache's books as well: a defect in them would turn it off, with the reason given here.
    """
    engine: ChunkEngine = request.app.state.engine_client
    return cache_stats(engine)


def cache_stats(engine: ChunkEngine) -> dict[str, Any]:
    """The JSON of ``GET /v1/cache/stats``."""
    if engine.manager is not None:
        engine.check_integrity()
    state: dict[str, Any] = {"enabled": engine.disabled_reason is None, "reason": engine.disabled_reason}
    if engine.manager is not None and engine.fills is not None:
        state["occupancy"] = {**engine.manager.occupancy(), "running_fills": engine.fills.num_running}
        state["counters"] = engine.manager.metrics.snapshot()
    return state
