# SPDX-License-Identifier: Apache-2.0
"""Attaches tiers to a running engine."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from cache.tiers.config import size_of
from cache.tiers.memory import MemoryTier
from engine_ext.chunks.tier_source import TierSource
from engine_ext.chunks.tier_writer import TierWriter
from engine_ext.client.engine import ChunkEngine


@asynccontextmanager
async def attached_tiers(engine: ChunkEngine, urls: Sequence[str]) -> AsyncIterator[None]:
    """Meanwhile, what is missing comes from tiers, and what is computed goes there."""
    if engine.manager is None or engine.fills is None:
        yield
        return
    workers = engine.transfers.num_workers if engine.transfers is not None else 1
    sizes = {scheme: size * (workers if scheme == MemoryTier.name else 1) for scheme, size in map(size_of, urls)}
    source = TierSource(list(sizes), engine.manager, lambda: engine.transfers, engine.fills.costs)
    engine.fills.sources.append(source)
    engine.fills.archive = archive = TierWriter(
        engine.llm, engine.manager, engine.release, sizes, lambda: engine.transfers
    )
    engine.manager.on_expired = archive.drop_later
    task = asyncio.create_task(archive.run(), name="archive")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
