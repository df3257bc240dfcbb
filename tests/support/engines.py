# SPDX-License-Identifier: Apache-2.0
"""Engines in this process."""

import os
from pathlib import Path

from vllm.engine.arg_utils import AsyncEngineArgs

from cache.positions.layout import Chunk, ChunkedPrompt, PositionStrategy, pack
from cache.report import Report
from engine_ext.client.engine import ChunkEngine
from engine_ext.start.startup import ChunkCacheOptions
from machine.server_process import python_path
from tests.engine.asking import ask_engine

OPTIONS = ChunkCacheOptions(
    pool_bytes=16 << 20,
    connector_class="tests.engine.faults.FaultyConnector",
    worker_extension_class="tests.engine.faults.FaultyWorkerExtension",
)


def engine_args(model: Path) -> AsyncEngineArgs:
    os.environ["PYTHONPATH"] = python_path()
    return AsyncEngineArgs(
        model=str(model), dtype="float32", max_model_len=2048, enforce_eager=True, kv_cache_memory_bytes=256 << 20
    )


PROMPT = ChunkedPrompt(
    tuple(range(5, 25)), (Chunk(pack(tuple(range(30, 90)))), Chunk(pack(tuple(range(40, 60))))), (7, 8, 9)
)


async def ask(
    engine: ChunkEngine, prompt: ChunkedPrompt = PROMPT, strategy: PositionStrategy = PositionStrategy.SHARED
) -> tuple[Report, list[int], list[float]]:
    return await ask_engine(engine, prompt, strategy)
