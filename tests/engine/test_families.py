# SPDX-License-Identifier: Apache-2.0
"""Every model family is exact, or served with the cache off and a reason.

Each has its own small engine, with the worker in the engine's process, which saves a third of the start time.
"""

import random
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from prometheus_client import REGISTRY
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from cache.positions.layout import Chunk, ChunkedPrompt, PositionStrategy, pack
from engine_ext.client.engine import ChunkEngine
from engine_ext.start.startup import ChunkCacheOptions, start_chunk_engine
from engine_ext.wire.vllm_compat import tokens_input
from machine.server_process import python_path
from tests.families import FAMILIES, MAX_POSITIONS
from tests.oracle import Oracle
from tests.support.engines import ask, input_of

pytestmark = pytest.mark.asyncio(loop_scope="module")


def tokens(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(4, 260), k=count)


SYSTEM, QUESTIONS = tokens(23, 1), (tokens(19, 2), tokens(1, 3))
A, B, C = tokens(70, 4), tokens(33, 5), tokens(1, 6)
ORDERS = ([A, B], [B, A, C])
"""Missing chunks, then cached chunks in another order with a new one."""
OPTIONS = ChunkCacheOptions(pool_bytes=16 << 20)

_IN_EVERY_RUN = "Llama 3 scaling"
"""tests/engine/test_dropped_blocks.py has a model with windows."""
_PARAMS = [pytest.param(name, marks=[] if name == _IN_EVERY_RUN else [pytest.mark.matrix]) for name in FAMILIES]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=_PARAMS)
async def started(request, tmp_path_factory) -> AsyncIterator[tuple[str, ChunkEngine, Path]]:
    folder = FAMILIES[request.param].build(tmp_path_factory.mktemp("family"))
    with environment(request.param):
        async with start_chunk_engine(arguments(request.param, folder), OPTIONS) as engine:
            yield request.param, engine, folder


def arguments(name: str, folder: Path, **more: Any) -> AsyncEngineArgs:
    given: Any = {"dtype": "float32", "max_model_len": MAX_POSITIONS, "enforce_eager": True}
    given |= {"distributed_executor_backend": "uni", "kv_cache_memory_bytes": 64 << 20}
    return AsyncEngineArgs(model=str(folder), **given, **FAMILIES[name].flags, **more)


@contextmanager
def environment(name: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", python_path())
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # otherwise the CPU build starts a worker process
        for variable, value in FAMILIES[name].environment.items():
            patch.setenv(variable, value)
        yield


async def test_exact_or_refused(started: tuple[str, ChunkEngine, Path]) -> None:
    name, engine, folder = started
    if (refused := FAMILIES[name].refused) is not None:
        assert refused in (engine.cache.reason or "")
        report, _, _ = await ask(engine, prompt([A, B], QUESTIONS[0]), PositionStrategy.SHARED)
        assert (report.mode, report.reason) == ("full", f"{engine.cache.reason}")
        return
    assert engine.cache.reason is None
    oracle, statuses = Oracle(folder), []
    for strategy in PositionStrategy:
        for chunks, question in zip(ORDERS, QUESTIONS, strict=True):
            report, answer, logprobs = await ask(engine, prompt(chunks, question), strategy)
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


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["Gemma 3", "gpt-oss", "Mistral, sliding"])
async def test_windows_need_as_many_blocks_as_in_stock_vllm(name: str, tmp_path: Path) -> None:
    folder, more = FAMILIES[name].build(tmp_path), {"block_size": 32, "max_num_batched_tokens": 128}
    asked = prompt([tokens(150, seed) for seed in range(5)], QUESTIONS[0])
    with environment(name):
        async with start_chunk_engine(arguments(name, folder, **more), OPTIONS) as engine:
            report, _, _ = await ask(engine, asked, PositionStrategy.OFFSET)
            assert report.mode == "chunked"
            ours = await blocks_in_use(engine, input_of(asked, PositionStrategy.OFFSET)[1])
        stock = AsyncLLM.from_engine_args(arguments(name, folder, **more))
        try:
            expected = await blocks_in_use(stock, tokens_input(list(asked.token_ids)))
        finally:
            stock.shutdown()
    assert ours == pytest.approx(expected, rel=0.05)


async def blocks_in_use(engine: Any, engine_input: Any) -> float:
    """Largest share of the engine's blocks that one answer holds from its first token on."""
    shares = []
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    async for _ in engine.generate(engine_input, params, "counted"):
        gauges = (metric for metric in REGISTRY.collect() if metric.name == "vllm:kv_cache_usage_perc")
        shares += [sample.value for gauge in gauges for sample in gauge.samples]
    return max(shares)
