# SPDX-License-Identifier: Apache-2.0
"""Brings the engine up with the chunk cache, or without it and with the reason."""

import hashlib
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from vllm.config import KVTransferConfig, VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from cache.config import ChunkCacheConfig, HashAlgorithm
from cache.eviction import EvictionPolicyName
from cache.manager import ChunkCacheManager
from engine_ext.engine import ChunkEngine, FillLimits
from engine_ext.self_check import SelfCheck, SelfCheckError
from engine_ext.support import unsupported_reason
from engine_ext.vllm_compat import build_async_engine_client_from_engine_args, vllm_version

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ChunkCacheOptions:
    """Start-up options of the chunk cache. ``pool_bytes`` is per worker, on its device."""

    enabled: bool = True
    pool_bytes: int = 1 << 30
    page_tokens: int = 32
    hash_algorithm: HashAlgorithm = "xxh3_128"
    eviction: EvictionPolicyName = "s3fifo"
    max_pinned_share: float = 0.9
    fill_limits: FillLimits = field(default_factory=FillLimits)
    connector_class: str = "engine_ext.connector.ChunkCacheConnector"
    worker_extension_class: str = "engine_ext.worker_extension.ChunkCacheWorkerExtension"


@asynccontextmanager
async def start_chunk_engine(engine_args: AsyncEngineArgs, options: ChunkCacheOptions) -> AsyncIterator[ChunkEngine]:
    """A running engine; shut down at the end. The cache is on only if the start-up self-check passed."""
    reason = _attach_connector(engine_args, options)
    async with build_async_engine_client_from_engine_args(engine_args) as llm:
        manager = None
        if reason is None:
            prepared = await prepare_cache(llm, options)
            manager, reason = (None, prepared) if isinstance(prepared, str) else (prepared, None)
        if reason is not None:
            logger.warning("chunk cache off: %s", reason)
        yield ChunkEngine(llm, manager, reason, options.fill_limits)


def _attach_connector(engine_args: AsyncEngineArgs, options: ChunkCacheOptions) -> str | None:
    """Adds the connector and the worker extension to the engine's arguments, or says why not."""
    if not options.enabled:
        return "switched off by --no-chunk-cache"
    if reason := unsupported_reason(engine_args, engine_args.create_model_config()):
        return reason
    module_path, _, name = options.connector_class.rpartition(".")
    engine_args.kv_transfer_config = KVTransferConfig(
        kv_connector=name,
        kv_connector_module_path=module_path,
        kv_role="kv_both",
        # Never mix recomputed and composed KV in one request: fail it, and run it anew in full attention.
        kv_load_failure_policy="fail",
        kv_connector_extra_config={"pool_bytes": options.pool_bytes, "page_tokens": options.page_tokens},
    )
    engine_args.worker_extension_cls = options.worker_extension_class
    return None


async def prepare_cache(llm: AsyncLLM, options: ChunkCacheOptions) -> ChunkCacheManager | str:
    """The manager of a pool that passed the self-check, or why there is none."""
    pools: list[dict[str, Any]] = await llm.collective_rpc("chunk_cache_prepare")
    if reasons := [pool["reason"] for pool in pools if "reason" in pool]:
        return str(reasons[0])
    manager = ChunkCacheManager(
        ChunkCacheConfig(
            num_pages=min(pool["num_pages"] for pool in pools),
            page_tokens=options.page_tokens,
            fingerprint=engine_fingerprint(llm.vllm_config),
            hash_algorithm=options.hash_algorithm,
            eviction=options.eviction,
            max_pinned_share=options.max_pinned_share,
            page_bytes=sum(pool["page_bytes"] for pool in pools),
        )
    )
    try:
        await SelfCheck(llm, manager.pool, options.page_tokens).run()
    except SelfCheckError as error:
        return f"self-check failed: {error}"
    except EngineDeadError:
        raise
    except Exception as error:
        # Not a verdict, but no proof of exactness either (a model length below the check's prompts, say).
        return f"self-check failed: {type(error).__name__}: {error}"
    tokens = manager.config.num_pages * options.page_tokens
    logger.info("chunk cache on: %d tokens in %d pages, self-check passed", tokens, manager.config.num_pages)
    return manager


def engine_fingerprint(config: VllmConfig) -> str:
    """Digest of everything beside the tokens that decides their KV."""
    model, parallel = config.model_config, config.parallel_config
    text_config = model.hf_text_config
    facts = {
        "vllm": vllm_version(),
        "model": [model.model, model.revision, model.code_revision, model.quantization],
        "tokenizer": [model.tokenizer, model.tokenizer_revision],
        "dtype": [str(model.dtype), config.cache_config.cache_dtype],
        "rope": [getattr(text_config, name, None) for name in ("rope_parameters", "rope_theta", "rope_scaling")],
        "parallel": [parallel.tensor_parallel_size, parallel.pipeline_parallel_size],
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()
