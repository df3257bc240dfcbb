# SPDX-License-Identifier: Apache-2.0
"""A preview promises what the run then does: both are admitted by the same checks, in the same order."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams

from cache.eviction.quotas import Quota
from cache.positions.layout import ChunkedPrompt, PositionStrategy
from cache.segments.hashing import CacheScope
from cache.sparse import Sparse
from engine_ext.chunks.cache_off import CacheOff
from engine_ext.client.engine import ChunkEngine
from engine_ext.client.plan_preview import preview
from engine_ext.client.request import CacheOptions, ChunkedRequest, Ticket
from tests.engine_ext.fake_llm import FakeLLM, ask, chunk, make_engine

OPTIONS = CacheOptions(position_strategy=PositionStrategy.OFFSET)
TWO = ChunkedPrompt((1, 2, 3), (chunk(100, 4), chunk(200, 4)), (9, 9))
"""Three pages: one for each segment."""


async def outcomes(
    engine: ChunkEngine, prompt: ChunkedPrompt = TWO, options: CacheOptions = OPTIONS, lora: Any = None, **params: Any
) -> list[tuple[str, str | None]]:
    """Mode and reason of the preview and of the run after it."""
    request = ChunkedRequest(Ticket(options, (None,) * len(prompt.chunks)), prompt)
    sampling = SamplingParams(max_tokens=1, **params)
    plan = preview(engine.cache, engine.resolve(request, sampling, lora))
    report = await ask(engine, prompt, options, sampling, lora_request=lora)
    return [(plan["mode"], plan["reason"]), (report.mode, report.reason)]


async def test_a_quota_that_the_chunks_exceed_or_another_request_uses_up() -> None:
    engine, _ = make_engine(quota_of=lambda owner: Quota(pages=2))
    assert await outcomes(engine) == [("full", "the chunks need more than what 'default' may have of the pool")] * 2
    engine, _ = make_engine(quota_of=lambda owner: Quota(segments=3))
    other = replace(TWO, chunks=(chunk(300, 4),))
    manager = engine.cache.manager
    fit = manager.fit(manager.look_up(other, CacheScope()), "default")
    held = manager.lease(fit, engine.cache.reindexer.layout(other, PositionStrategy.OFFSET))
    (mode, reason), run = await outcomes(engine)
    assert (mode, reason) == run
    assert mode == "full"
    manager.release(held)


@pytest.mark.parametrize("options", [{"recompute": 0.5}, {"reread": 0.5}, {"sparse": Sparse(budget_share=0.5)}])
async def test_nothing_is_computed_where_attention_cannot_be_measured(options: dict[str, Any]) -> None:
    engine, llm = make_engine(no_attention="sliding windows")
    report = await ask(engine, TWO, replace(OPTIONS, **options), SamplingParams(max_tokens=1))
    assert (report.mode, report.reason) == ("full", "the attention to chunks can't be measured: sliding windows")
    assert not llm.computed


async def test_a_quota_that_only_windows_exceed() -> None:
    """Three pages for the segments and one for a window."""
    quotas = {"default": Quota(pages=3)}
    engine, llm = make_engine(quota_of=lambda owner: quotas[owner])
    anew = replace(OPTIONS, recompute=0.5)
    refused = await outcomes(engine, options=anew)
    assert refused == [("full", "the chunks need more than what 'default' may have of the pool")] * 2
    assert not llm.computed, "nothing is computed in vain"
    quotas["default"] = Quota(pages=4)
    assert await outcomes(engine, options=anew) == [("chunked", None)] * 2


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({"prompt_logprobs": 1}, "prompt_logprobs need every prompt token computed"),
        ({"skip_reading_prefix_cache": True}, "the request asks not to read caches"),
    ],
)
async def test_parameters_that_need_every_token_computed(params: dict[str, Any], reason: str) -> None:
    engine, _ = make_engine()
    assert await outcomes(engine, **params) == [("full", reason)] * 2


async def test_of_several_reasons_the_same_is_given() -> None:
    """An adapter that was not loaded, in a pool that is too small."""
    engine, _ = make_engine(2)
    lora = SimpleNamespace(lora_name="a", lora_int_id=1)
    assert await outcomes(engine, lora=lora) == [("full", "the adapter a was not loaded by this server")] * 2
    assert await outcomes(engine) == [("full", "the chunks need 3 more pages of 4 tokens; 2 of 2 can be freed")] * 2
    full = replace(OPTIONS, mode="full")
    assert await outcomes(engine, options=full, lora=lora) == [("full", "cache.mode is full")] * 2


async def test_a_cache_that_is_off_and_books_that_were_found_wrong() -> None:
    llm: Any = FakeLLM()
    assert await outcomes(ChunkEngine(llm, CacheOff("switched off"))) == [("full", "switched off")] * 2
    engine, _ = make_engine()
    assert await outcomes(engine) == [("chunked", None)] * 2
    engine.cache.manager.pool.allocate(1)  # a page without an owner
    engine.cache.check_integrity()
    (mode, reason), run = await outcomes(engine)
    assert (mode, reason) == run
    assert mode == "full"
    assert str(reason).startswith("integrity check failed: ")
