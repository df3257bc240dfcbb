# SPDX-License-Identifier: Apache-2.0
"""Endpoint parameters taken from the application's state."""

from http import HTTPStatus
from typing import Annotated

from fastapi import Depends, Request
from starlette.datastructures import State

from app.catalog.segments import Catalog
from app.context import ServerContext
from cache.errors import FullAttentionError
from cache.manager import ChunkCacheManager
from engine_ext.chunks.cache_off import CacheOff
from engine_ext.chunks.tier_writer import TierWriter
from engine_ext.client.engine import ChunkEngine
from engine_ext.client.request import CALLER
from engine_ext.wire.vllm_compat import GracefulHTTPError

# Asynchronous, since FastAPI runs other dependencies in threads.


async def _state(request: Request) -> State:
    state: State = request.app.state
    return state


AppState = Annotated[State, Depends(_state)]


async def _context(state: AppState) -> ServerContext:
    context: ServerContext = state.tessera
    return context


Context = Annotated[ServerContext, Depends(_context)]


async def _engine(state: AppState) -> ChunkEngine:
    engine: ChunkEngine = state.engine_client
    return engine


Engine = Annotated[ChunkEngine, Depends(_engine)]


async def _manager(engine: Engine) -> ChunkCacheManager:
    try:
        return engine.cache.usable().manager
    except FullAttentionError as error:
        raise GracefulHTTPError(f"the chunk cache is off: {error}", HTTPStatus.CONFLICT) from error


async def _tiers(engine: Engine) -> TierWriter:
    cache = engine.cache
    if isinstance(cache, CacheOff) or not cache.tier_writer.tiers:
        raise GracefulHTTPError("there are no tiers (--chunk-cache-tiers)", HTTPStatus.CONFLICT)
    return cache.tier_writer


Manager = Annotated[ChunkCacheManager, Depends(_manager)]
"""The chunk cache's state; 409 while the cache is off."""
Tiers = Annotated[TierWriter, Depends(_tiers)]
"""The tiers beside the pool; 409 without any."""


async def _catalog(manager: Manager) -> Catalog:
    return Catalog(manager, CALLER.get())


CallersCatalog = Annotated[Catalog, Depends(_catalog)]
"""The cached segments that the caller may see; 409 while the cache is off."""
