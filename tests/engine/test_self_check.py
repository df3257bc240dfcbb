# SPDX-License-Identifier: Apache-2.0
"""The start-up self-check catches every injected fault; requests then run in full attention. One engine for all."""

import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind, SamplingParams

from cache.layout import Chunk, ChunkedPrompt
from cache.manager import ChunkCacheManager
from engine_ext.engine import ChunkEngine
from engine_ext.request import REQUEST_KEY, CacheOptions, ChunkedRequest, Ticket
from engine_ext.startup import ChunkCacheOptions, prepare_cache, start_chunk_engine
from engine_ext.vllm_compat import tokens_input

pytestmark = pytest.mark.asyncio(loop_scope="module")

OPTIONS = ChunkCacheOptions(
    pool_bytes=16 << 20,
    connector_class="tests.engine.faults.FaultyConnector",
    worker_extension_class="tests.engine.faults.FaultyWorkerExtension",
)
FAULTS = [
    "wrong frequency",
    "wrong pairing",
    "wrong sign",
    "swapped K and V",
    "transposed K",
    "nothing loaded",
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(model_path: Callable[[str], Path]) -> AsyncIterator[ChunkEngine]:
    root = str(Path(__file__).resolve().parents[2])
    os.environ["PYTHONPATH"] = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
    args = AsyncEngineArgs(
        model=str(model_path("tiny-llama")),
        dtype="float32",
        max_model_len=2048,
        enforce_eager=True,
        kv_cache_memory_bytes=256 << 20,
    )
    async with start_chunk_engine(args, OPTIONS) as engine:
        yield engine


async def prepare_with(engine: ChunkEngine, fault: str) -> ChunkCacheManager | str:
    """Runs the start-up again in an engine that makes the fault; blocks of the last check are forgotten."""
    await engine.llm.collective_rpc("inject_fault", args=(fault,))
    assert await engine.llm.reset_prefix_cache()
    return await prepare_cache(engine.llm, OPTIONS)


async def answer(engine: ChunkEngine) -> tuple[Ticket, int]:
    """A request with chunks; its ticket with the report, and how many tokens came out."""
    ticket = Ticket(CacheOptions(), (None, None))
    prompt = ChunkedPrompt(tuple(range(5, 25)), (Chunk(tuple(range(30, 90))), Chunk(tuple(range(40, 60)))), (7, 8, 9))
    engine_input: Any = {**tokens_input(prompt.token_ids), REQUEST_KEY: ChunkedRequest(ticket, prompt)}
    params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    outputs = [output async for output in engine.generate(engine_input, params, f"request-{id(ticket)}")]
    return ticket, sum(len(output.outputs[0].token_ids) for output in outputs)


async def test_a_sound_engine_passes(engine: ChunkEngine) -> None:
    assert engine.disabled_reason is None
    ticket, num_tokens = await answer(engine)
    assert ticket.report is not None
    assert (ticket.report.mode, num_tokens) == ("chunked", 3)


@pytest.mark.parametrize("fault", FAULTS)
async def test_faults_are_caught(engine: ChunkEngine, fault: str) -> None:
    reason = await prepare_with(engine, fault)
    assert isinstance(reason, str), f"the self-check passed with {fault}"
    assert reason.startswith("self-check failed: ")
    ticket, num_tokens = await answer(ChunkEngine(engine.llm, None, reason))
    assert ticket.report is not None
    assert (ticket.report.mode, ticket.report.reason, num_tokens) == ("full", reason, 3)


async def test_the_engine_is_sound_again_without_the_fault(engine: ChunkEngine) -> None:
    assert isinstance(await prepare_with(engine, "none"), ChunkCacheManager)


async def test_a_pool_without_pages_is_refused(engine: ChunkEngine) -> None:
    with pytest.raises(ValueError, match="num_pages"):
        type(engine.manager.config)(num_pages=0, page_tokens=16, fingerprint="")  # type: ignore[union-attr]


async def test_wrongly_tagged_pages_are_refused_and_recomputed(engine: ChunkEngine) -> None:
    """A worker that lost its pages fails the load; the request runs in full attention, and the next one fills anew."""
    manager = await prepare_with(engine, "none")
    assert isinstance(manager, ChunkCacheManager)
    fresh = ChunkEngine(engine.llm, manager, None)
    first, _ = await answer(fresh)
    await engine.llm.collective_rpc("forget_page_tags")
    assert await engine.llm.reset_prefix_cache()
    refused, num_tokens = await answer(fresh)
    assert first.report is not None
    assert refused.report is not None
    assert (first.report.mode, refused.report.mode, num_tokens) == ("chunked", "full", 3)
    assert refused.report.reason == "a worker refused to load the cached chunks"
    assert manager.metrics.refused_loads == 1
    again, _ = await answer(fresh)
    assert again.report is not None
    assert [chunk.status for chunk in again.report.chunks] == ["filled", "filled"]
    manager.check_integrity()
