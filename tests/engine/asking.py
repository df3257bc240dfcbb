# SPDX-License-Identifier: Apache-2.0
"""Requests to a `ChunkEngine` in the tests' own process."""

from typing import Any

from vllm.sampling_params import RequestOutputKind, SamplingParams

from cache.positions.layout import ChunkedPrompt, PositionStrategy
from cache.report import Report
from engine_ext.client.engine import ChunkEngine
from engine_ext.client.request import REQUEST_KEY, CacheOptions, ChunkedRequest, Ticket
from engine_ext.wire.vllm_compat import tokens_input

STEPS = 8


def input_of(prompt: ChunkedPrompt, strategy: PositionStrategy) -> tuple[Ticket, Any]:
    """A request's context, which gets its report, and the engine's input."""
    context = Ticket(CacheOptions(position_strategy=strategy), (None,) * len(prompt.chunks))
    return context, {**tokens_input(prompt.token_ids), REQUEST_KEY: ChunkedRequest(context, prompt)}


async def ask_engine(
    engine: ChunkEngine, prompt: ChunkedPrompt, strategy: PositionStrategy = PositionStrategy.SHARED
) -> tuple[Report, list[int], list[float]]:
    """Report, tokens and log probabilities of one request."""
    ticket, engine_input = input_of(prompt, strategy)
    params = SamplingParams(
        max_tokens=STEPS, temperature=0, ignore_eos=True, logprobs=0, output_kind=RequestOutputKind.FINAL_ONLY
    )
    (output,) = [output async for output in engine.generate(engine_input, params, f"request-{id(ticket)}")]
    tokens = list(output.outputs[0].token_ids)
    logprobs = [step[token].logprob for step, token in zip(output.outputs[0].logprobs, tokens, strict=True)]
    assert len(tokens) == STEPS
    return Report.model_validate(ticket.report), tokens, logprobs
