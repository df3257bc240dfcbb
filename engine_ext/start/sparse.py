# SPDX-License-Identifier: Apache-2.0
"""Prepares the workers' attention: to choose chunks for sparse requests, and blocks for generated tokens."""

import logging
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.engine.async_llm import AsyncLLM

from cache.config import ChunkCacheConfig
from engine_ext.chunks.representations import Representations
from engine_ext.start.support import attention_reason

logger = logging.getLogger(__name__)

_REPRESENTED_SHARE = 0.25
"""Memory of chunks' representations, at most, as a share of the pool's."""


async def prepare_scoring(
    llm: AsyncLLM, pool: ChunkCacheConfig, layers: tuple[int, ...] | None
) -> Representations | None:
    """Lets probes score chunks in ``layers``, or in one at three fifths of the model's depth if there are none.

    Returns ``None`` if no request needs it (``layers`` is ``None``), or the workers can't.
    """
    if layers is None:
        return None
    config: VllmConfig = llm.vllm_config
    layers = layers or (3 * config.model_config.get_num_layers(config.parallel_config) // 5,)
    if reason := await refused(llm, "chunk_cache_prepare_probes", layers):
        logger.warning("no chunk is left out, sparse requests run in full attention: %s", reason)
        return None
    return Representations(llm, int(pool.num_pages * pool.page_bytes * _REPRESENTED_SHARE))


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
