# SPDX-License-Identifier: Apache-2.0
"""Prepare the workers' attention: to read chunks in the pool, to measure attention to them, to choose blocks."""

import logging
from typing import Any

from vllm.v1.engine.async_llm import AsyncLLM

from engine_ext.start.support import attention_reason

logger = logging.getLogger(__name__)


async def prepare_decoding(llm: AsyncLLM, budget_tokens: int | None, *, attends: bool) -> int | None:
    """Lets generated tokens read some blocks only; returns their budget, ``None`` without one.

    ``attends``: requests attend to the pool, where there are no blocks to choose from.
    """
    if budget_tokens is None:
        return None
    reason = "it doesn't go with --chunk-cache-placement attend" if attends else None
    if reason := reason or await refused(llm, "chunk_cache_prepare_decoding", budget_tokens):
        logger.warning("generated tokens attend to everything, whatever --decode-sparse-budget says: %s", reason)
        return None
    return budget_tokens


async def refused(llm: AsyncLLM, method: str, *args: Any) -> str | None:
    """Prepares the workers' attention by ``method``; returns the engine's or the first worker's reason against it."""
    return attention_reason(llm.vllm_config) or await workers_reason(llm, method, *args)


async def workers_reason(llm: AsyncLLM, method: str, *args: Any) -> str | None:
    """The first worker's reason that ``method`` returns, if any does."""
    reasons: list[str | None] = await llm.collective_rpc(method, args=args)
    return next(filter(None, reasons), None)
