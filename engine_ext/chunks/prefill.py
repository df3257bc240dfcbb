# SPDX-License-Identifier: Apache-2.0
"""Requests run for their KV alone, by fills and by the self-check, and probes."""

from contextlib import aclosing
from typing import Any

from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from engine_ext.wire.plan import SAVED_KEY, TransferPlan
from engine_ext.wire.vllm_compat import tokens_input


class NotSavedError(Exception):
    """The request ended without carrying out its plan's saves."""


async def run_prefill(
    llm: AsyncLLM,
    prompt_ids: list[int],
    plan: TransferPlan,
    request_id: str,
    cache_salt: str | None,
    **generate_kwargs: Any,
) -> RequestOutput:
    """Runs ``prompt_ids`` with ``plan``, which has saves; returns the output, or raises :class:`NotSavedError`."""
    output = await run_plan(llm, prompt_ids, plan, request_id, cache_salt, **generate_kwargs)
    reason = output.outputs[0].finish_reason
    # A request whose load was refused ends with an error; its saved KV was computed behind other KV.
    if reason == "error" or not (output.kv_transfer_params or {}).get(SAVED_KEY):
        raise NotSavedError(f"it ended with {reason!r}, nothing saved")
    return output


async def run_plan(
    llm: AsyncLLM,
    prompt_ids: list[int],
    plan: TransferPlan,
    request_id: str,
    cache_salt: str | None,
    **generate_kwargs: Any,
) -> RequestOutput:
    """Runs ``prompt_ids`` to the first token with ``plan``; the output may be an error."""
    params = SamplingParams(
        max_tokens=1,
        temperature=0.0,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args={"kv_transfer_params": plan.to_params()},
    )
    prompt = tokens_input(prompt_ids, cache_salt=cache_salt)
    async with aclosing(llm.generate(prompt, params, request_id, **generate_kwargs)) as outputs:
        (output,) = [output async for output in outputs]
    return output
