# SPDX-License-Identifier: Apache-2.0
"""`ChunkEngine` with placement `attend` in this process: its self-check, refusals and resets."""

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from engine_ext.chunks.chunk_cache import ChunkCache
from engine_ext.client.engine import ChunkEngine
from engine_ext.start.self_check import SelfCheck, SelfCheckError
from engine_ext.start.startup import start_chunk_engine
from tests.support.engines import OPTIONS, PROMPT, ask, engine_args
from tests.support.saved_models import large_biases, saved

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.matrix]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(model_path: Callable[[str], Path]) -> AsyncIterator[ChunkEngine]:
    options = replace(OPTIONS, placement="attend")
    async with start_chunk_engine(engine_args(model_path("tiny-llama")), options) as engine:
        yield engine


def assert_exact(answer: tuple[Any, list[int], list[float]], oracle: Any) -> None:
    report, tokens, logprobs = answer
    assert (report.mode, report.placement) == ("chunked", "attend")
    segments = (list(PROMPT.system), [list(chunk.token_ids) for chunk in PROMPT.chunks], list(PROMPT.question))
    assert logprobs == pytest.approx(oracle("tiny-llama").score("shared", segments, tokens).logprobs, abs=1e-4)


async def test_a_sound_engine_attends(engine: ChunkEngine, oracle: Any) -> None:
    assert engine.cache.placement == "attend"
    assert_exact(await ask(engine), oracle)


@pytest.mark.parametrize("fault", ["wrong turn", "wrong scale", "wrong if long", "missing segment"])
async def test_faults_are_caught(engine: ChunkEngine, fault: str) -> None:
    check = SelfCheck(engine.llm, engine.cache.config)
    engine.cache.clear()  # the check uses the pool's first pages
    await engine.llm.collective_rpc("inject_fault", args=(fault,))
    assert await engine.llm.reset_prefix_cache()
    try:
        with pytest.raises(SelfCheckError, match=r"attention of \d+ tokens: loaded KV differs from computed KV"):
            await check.run_attention()
    finally:
        await engine.llm.collective_rpc("inject_fault", args=("none",))
    assert await engine.llm.reset_prefix_cache()
    await check.run_attention()


async def test_rounding_of_large_keys_is_no_fault(model_path: Callable[[str], Path], tmp_path: Path) -> None:
    args = replace(engine_args(saved(large_biases, model_path("tiny-llama"), tmp_path / "model")), dtype="bfloat16")
    async with start_chunk_engine(args, replace(OPTIONS, placement="attend")) as engine:
        assert isinstance(engine.cache, ChunkCache), engine.cache.reason
        assert engine.cache.placement == "attend"
        check = SelfCheck(engine.llm, engine.cache.config)
        engine.cache.clear()
        await engine.llm.collective_rpc("inject_fault", args=("wrong turn",))
        assert await engine.llm.reset_prefix_cache()
        with pytest.raises(SelfCheckError, match=r"turned attention of \d+ tokens: loaded KV differs"):
            await check.run_attention()


async def test_other_kv_is_noticed_before_the_answer_and_recomputed(engine: ChunkEngine, oracle: Any) -> None:
    """Pages that were given away fail the request; also if vLLM finds all of its blocks in its prefix cache."""
    assert_exact(await ask(engine), oracle)
    await engine.llm.collective_rpc("chunk_cache_forget")
    refused, _, _ = await ask(engine)
    assert (refused.mode, refused.reason) == ("full", "a worker refused to load the cached chunks")
    again = await ask(engine)
    assert [chunk.status for chunk in again[0].chunks] == ["filled", "filled"]
    assert_exact(again, oracle)


async def test_after_a_reset_of_the_prefix_cache_answers_are_exact(engine: ChunkEngine, oracle: Any) -> None:
    for _ in range(2):
        assert await engine.llm.reset_prefix_cache()
        assert_exact(await ask(engine), oracle)
    assert await engine.reset_prefix_cache()
    again = await ask(engine)
    assert [chunk.status for chunk in again[0].chunks] == ["filled", "filled"]
    assert_exact(again, oracle)
