# SPDX-License-Identifier: Apache-2.0
"""Every model family is exact, or served with the cache off and a reason.

Each has its own small engine, with the worker in the engine's process, which saves a third of the start time.
"""

import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from vllm.engine.arg_utils import AsyncEngineArgs

from cache.positions.layout import Chunk, ChunkedPrompt, PositionStrategy, pack
from engine_ext.client.engine import ChunkEngine
from engine_ext.start.startup import ChunkCacheOptions, start_chunk_engine
from tests.engine.asking import ask_engine
from tests.families import FAMILIES, MAX_POSITIONS
from tests.oracle import Oracle
from tests.vllm_versions import HAS_FLOAT32_SINKS, HAS_MLA_ON_CPUS, REFUSED_FAMILIES, needs
from tools.server_process import python_path

pytestmark = pytest.mark.asyncio(loop_scope="module")


def tokens(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(4, 260), k=count)


SYSTEM, QUESTIONS = tokens(23, 1), (tokens(19, 2), tokens(1, 3))
A, B, C = tokens(70, 4), tokens(33, 5), tokens(1, 6)
ORDERS = ([A, B], [B, A, C])
"""Missing chunks, then cached chunks in another order with a new one."""


_IN_EVERY_RUN = {
    "Llama 3 scaling",
    "Phi-3 long-rope, short",
    "Gemma 3",
}
_MLA = needs(HAS_MLA_ON_CPUS, "latent attention on CPUs")
_NEEDS = {
    "gpt-oss": [needs(HAS_FLOAT32_SINKS, "attention sinks in float32 on CPUs")],
    "DeepSeek V2, MLA": [_MLA],
    "DeepSeek V3, MLA": [_MLA],
}
_PARAMS = [
    pytest.param(name, marks=_NEEDS.get(name, []) + [pytest.mark.matrix] * (name not in _IN_EVERY_RUN))
    for name in FAMILIES
]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=_PARAMS)
async def started(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[str, ChunkEngine, Path]]:
    family = FAMILIES[request.param]
    folder = family.build(tmp_path_factory.mktemp("family"))
    args = AsyncEngineArgs(
        model=str(folder),
        dtype="float32",
        max_model_len=MAX_POSITIONS,
        enforce_eager=True,
        distributed_executor_backend="uni",
        kv_cache_memory_bytes=64 << 20,
        **family.flags,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", python_path())
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # otherwise the CPU build starts a worker process
        for name, value in family.environment.items():
            patch.setenv(name, value)
        async with start_chunk_engine(args, ChunkCacheOptions(pool_bytes=16 << 20)) as engine:
            yield request.param, engine, folder


async def test_exact_or_refused(started: tuple[str, ChunkEngine, Path]) -> None:
    name, engine, folder = started
    if (refused := FAMILIES[name].refused or REFUSED_FAMILIES.get(name)) is not None:
        assert refused in (engine.cache.reason or "")
        report, _, _ = await ask_engine(engine, prompt([A, B], QUESTIONS[0]), PositionStrategy.SHARED)
        assert (report.mode, report.reason) == ("full", f"{engine.cache.reason}")
        return
    assert engine.cache.reason is None
    oracle, statuses = Oracle(folder), []
    for strategy in PositionStrategy:
        for chunks, question in zip(ORDERS, QUESTIONS, strict=True):
            report, answer, logprobs = await ask_engine(engine, prompt(chunks, question), strategy)
            assert report.mode == "chunked"
            statuses.append([chunk.status for chunk in report.chunks])
            expected = oracle.score(strategy.value, (SYSTEM, chunks, question), answer)
            assert logprobs == pytest.approx(expected.logprobs, abs=1e-4)
            full = oracle.score("full", (SYSTEM, chunks, question), answer)
            assert full.logprobs != pytest.approx(expected.logprobs, abs=1e-2), "the oracle tells nothing apart"
    assert statuses == [
        ["filled"] * 2,
        ["hit", "hit", "filled"],
        *[["hit"] * 2, ["hit"] * 3] * (len(PositionStrategy) - 1),
    ]


def prompt(chunks: list[list[int]], question: list[int]) -> ChunkedPrompt:
    return ChunkedPrompt(tuple(SYSTEM), tuple(Chunk(pack(tuple(chunk))) for chunk in chunks), tuple(question))
