# SPDX-License-Identifier: Apache-2.0
"""Engines in this process."""

import os
from pathlib import Path
from typing import Any

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind, SamplingParams

from cache.positions.layout import Chunk, ChunkedPrompt, PositionStrategy, pack
from cache.report import Report
from engine_ext.client.engine import ChunkEngine
from engine_ext.client.request import REQUEST_KEY, CacheOptions, ChunkedRequest, Ticket
from engine_ext.start.startup import ChunkCacheOptions
from engine_ext.wire.vllm_compat import tokens_input
from machine.server_process import python_path

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


STEPS = 8


def input_of(prompt: ChunkedPrompt, strategy: PositionStrategy) -> tuple[Ticket, Any]:
    """A request's context, which gets its report, and the engine's input."""
    context = Ticket(CacheOptions(position_strategy=strategy), (None,) * len(prompt.chunks))
    return context, {**tokens_input(prompt.token_ids), REQUEST_KEY: ChunkedRequest(context, prompt)}


async def ask(
    engine: ChunkEngine, prompt: ChunkedPrompt = PROMPT, strategy: PositionStrategy = PositionStrategy.SHARED
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
