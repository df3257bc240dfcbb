# SPDX-License-Identifier: Apache-2.0
"""Requests to a `ChunkEngine` in the tests' own process."""

from typing import Any

from vllm.sampling_params import RequestOutputKind, SamplingParams

from cache.positions.layout import ChunkedPrompt, PositionStrategy
from cache.report import Report
from engine_ext.client.engine import ChunkEngine
from engine_ext.wire.request import REQUEST_KEY, CacheOptions, ChunkedRequest, RequestContext
from engine_ext.wire.vllm_compat import tokens_input

STEPS = 8


async def ask_engine(
    engine: ChunkEngine, prompt: ChunkedPrompt, strategy: PositionStrategy = PositionStrategy.SHARED
) -> tuple[Report, list[int], list[float]]:
    """Report, tokens and log probabilities of one request."""
    ticket = RequestContext(CacheOptions(position_strategy=strategy), (None,) * len(prompt.chunks))
    engine_input: Any = {**tokens_input(prompt.token_ids), REQUEST_KEY: ChunkedRequest(ticket, prompt)}
    params = SamplingParams(
        max_tokens=STEPS, temperature=0, ignore_eos=True, logprobs=0, output_kind=RequestOutputKind.FINAL_ONLY
    )
    (output,) = [output async for output in engine.generate(engine_input, params, f"request-{id(ticket)}")]
    tokens = list(output.outputs[0].token_ids)
    logprobs = [step[token].logprob for step, token in zip(output.outputs[0].logprobs, tokens, strict=True)]
    assert ticket.report is not None
    assert len(tokens) == STEPS
    return ticket.report, tokens, logprobs
