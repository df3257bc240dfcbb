# SPDX-License-Identifier: Apache-2.0
"""`ChunkEngine` in this process, one engine for all: the self-check catches every injected fault, and segments that
HTTP can't produce (of one token, or none) are exact.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams

from cache.config import ChunkCacheConfig
from cache.manager import ChunkCacheManager
from cache.positions.layout import Chunk, ChunkedPrompt, PositionStrategy, pack
from engine_ext.chunks.cache_off import CacheOff
from engine_ext.chunks.chunk_cache import ChunkCache
from engine_ext.client.engine import ChunkEngine
from engine_ext.start.startup import prepare_pool, start_chunk_engine
from engine_ext.wire.vllm_compat import tokens_input
from tests.engine.faults import LOST
from tests.support.engines import OPTIONS, PROMPT, ask, engine_args

STRATEGIES = [
    pytest.param(each, marks=[] if each is PositionStrategy.OFFSET else pytest.mark.matrix) for each in PositionStrategy
]
pytestmark = pytest.mark.asyncio(loop_scope="module")

FAULTS = ["wrong frequency", "wrong pairing", "wrong sign", "swapped K and V", "transposed K", "nothing loaded"]


@pytest.fixture(scope="module", params=["tiny-llama", pytest.param("tiny-qwen3", marks=pytest.mark.matrix)])
def model(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(model: str, model_path: Callable[[str], Path]) -> AsyncIterator[ChunkEngine]:
    async with start_chunk_engine(engine_args(model_path(model)), OPTIONS) as engine:
        yield engine


async def prepare_with(engine: ChunkEngine, fault: str) -> ChunkCacheConfig | str:
    """Repeats the startup in an engine with the fault; drops blocks of the previous check."""
    await engine.llm.collective_rpc("inject_fault", args=(fault,))
    assert await engine.llm.reset_prefix_cache()
    return await prepare_pool(engine.llm, OPTIONS)


async def prepared(engine: ChunkEngine) -> tuple[ChunkEngine, ChunkCacheManager]:
    """The same engine with an empty chunk cache."""
    config = await prepare_with(engine, "none")
    assert isinstance(config, ChunkCacheConfig)
    cache = ChunkCache(engine.llm, config)
    return ChunkEngine(engine.llm, cache), cache.manager


async def test_a_sound_engine_passes(engine):
    assert engine.cache.reason is None
    assert (await ask(engine))[0].mode == "chunked"


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("system", [(), (11,), tuple(range(20, 60))])
@pytest.mark.parametrize("lengths", [(1,), (1, 1, 1), (1, 40, 2), (16, 1)])
async def test_segments_of_one_token_or_none(engine, model, oracle, strategy, system, lengths):
    source = random.Random(str((strategy, system, lengths)))
    chunks = tuple(Chunk(pack(tuple(source.choices(range(10, 250), k=n)))) for n in lengths)
    for question in ((9,), tuple(range(100, 117))):
        for order in (chunks, chunks[::-1]):
            report, tokens, logprobs = await ask(engine, ChunkedPrompt(system, order, question), strategy)
            assert report.mode == "chunked"
            segments = (list(system), [list(chunk.token_ids) for chunk in order], list(question))
            expected = oracle(model).score(strategy.value, segments, tokens).logprobs
            assert logprobs == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("fault", FAULTS)
async def test_faults_are_caught(engine, fault):
    """The engine then keeps its connector, which clients must not reach."""
    reason = await prepare_with(engine, fault)
    assert isinstance(reason, str), f"the self-check passed with {fault}"
    assert reason.startswith("self-check failed: ")
    off = ChunkEngine(engine.llm, CacheOff(reason))
    for plan in ({}, {"loads": [[0, 8, 0, -1, [0]]], "saves": []}):
        params = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": {"tessera": plan}})
        with pytest.raises(VLLMValidationError, match="reserved"):
            off.generate(tokens_input([5, 6, 7]), params, "forged")
        await off.notify_kv_transfer_request_rejected("forged", {"tessera": plan})
    report, _, _ = await ask(off)
    assert (report.mode, report.reason) == ("full", reason)


async def test_wrongly_tagged_pages_are_refused_and_recomputed(engine):
    """A worker without its pages refuses the load; the request runs in full attention, and the next one fills again."""
    fresh, manager = await prepared(engine)
    first, _, _ = await ask(fresh)
    await engine.llm.collective_rpc("chunk_cache_forget")
    assert await engine.llm.reset_prefix_cache()
    refused, _, _ = await ask(fresh)
    assert (first.mode, refused.mode) == ("chunked", "full")
    assert refused.reason == "a worker refused to load the cached chunks"
    assert manager.metrics.refused_loads == 1
    again, _, _ = await ask(fresh)
    assert [chunk.status for chunk in again.chunks] == ["filled", "filled"]
    manager.check_integrity()


@pytest.mark.parametrize("is_lost", [False, True])
async def test_a_fill_loads_the_system_segment_or_computes_it_if_its_pages_are_lost(engine, model, oracle, is_lost):
    fresh, manager = await prepared(engine)
    await ask(fresh)
    if is_lost:
        await engine.llm.collective_rpc("chunk_cache_forget")
    source = random.Random(str((model, is_lost)))
    chunk = Chunk(pack(tuple(source.choices(range(10, 250), k=40))))
    prompt = ChunkedPrompt(PROMPT.system, (chunk,), (7, 8, 9))
    report, tokens, logprobs = await ask(fresh, prompt)
    assert (report.mode, report.chunks[0].status) == ("chunked", "filled")
    assert report.tokens.fill_computed == 40 + (len(PROMPT.system) if is_lost else 0)
    assert manager.metrics.fills["failed"] == is_lost
    assert manager.metrics.removals["refused"] == is_lost
    segments = (list(prompt.system), [list(chunk.token_ids)], list(prompt.question))
    assert logprobs == pytest.approx(oracle(model).score("shared", segments, tokens).logprobs, abs=1e-4)
    assert manager.is_idle
    manager.check_integrity()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("lost", [1, 2])
async def test_a_fill_that_was_not_saved_is_done_once_more_by_one_who_waited(engine, model, oracle, lost, strategy):
    fresh, manager = await prepared(engine)
    source = random.Random(str((lost, strategy)))
    broken, sound = Chunk(pack((*source.choices(range(10, 250), k=40), *LOST, lost))), Chunk(pack(tuple(range(50, 80))))
    prompt = ChunkedPrompt(PROMPT.system, (broken, sound), (7, 8, 9))
    answers = await asyncio.gather(*(ask(fresh, prompt, strategy) for _ in range(6)))
    if lost == 1:
        assert {report.mode for report, _, _ in answers} == {"chunked"}
        assert [report.chunks[0].status for report, _, _ in answers].count("filled") == 1
        assert manager.metrics.fills == {"succeeded": 2, "failed": 1}
    else:
        assert {report.mode for report, _, _ in answers} == {"full"}
        (reason,) = {report.reason for report, _, _ in answers}
        assert (reason or "").startswith("a fill request failed")
        assert "nothing saved" in (reason or "")
        assert manager.metrics.fills == {"succeeded": 1, "failed": 2}
        answers.append(await ask(fresh, prompt, strategy))
        assert answers[-1][0].mode == "chunked"
    segments = (list(prompt.system), [list(chunk.token_ids) for chunk in prompt.chunks], list(prompt.question))
    for report, tokens, logprobs in answers:
        of = strategy.value if report.mode == "chunked" else "full"
        assert logprobs == pytest.approx(oracle(model).score(of, segments, tokens).logprobs, abs=1e-4)
    assert manager.is_idle
    manager.check_integrity()
