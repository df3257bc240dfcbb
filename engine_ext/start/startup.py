# SPDX-License-Identifier: Apache-2.0
"""Starts the engine with the chunk cache, or without it, with the reason."""

import asyncio
import logging
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.lora.request import LoRARequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from cache.config import ChunkCacheConfig, ChunkCacheUse
from cache.eviction.policies import EvictionPolicyName
from cache.eviction.quotas import Quota
from cache.positions.layout import PlacementName, PositionReindexer, PositionStrategy
from cache.positions.strategy import TRAINED_FOR, UNKNOWN, DefaultStrategy, strategy_for
from cache.tiers.config import size_of
from cache.tiers.memory import MemoryTier
from cache.tiers.signed import TierKey
from engine_ext.chunks.cache_off import CacheOff
from engine_ext.chunks.chunk_cache import ChunkCache
from engine_ext.chunks.transfers import opened_transfers
from engine_ext.client.engine import ChunkEngine
from engine_ext.client.position_limit import window_of
from engine_ext.start.chunk_adapter import ChunkAdapter
from engine_ext.start.connectors import attach_connector, keeps_prefixes, pass_on_blocks
from engine_ext.start.fingerprint import engine_fingerprint, weights_digest
from engine_ext.start.memory import make_room
from engine_ext.start.plugin import extend_backends
from engine_ext.start.positions import model_config
from engine_ext.start.self_check import SelfCheck, SelfCheckError
from engine_ext.start.stages import CHECKING
from engine_ext.start.support import (
    attention_reason,
    drops_blocks,
    in_place_reason,
    is_quantized,
    turning_reason,
    unsupported_reason,
)
from engine_ext.start.weights import UnknownWeightsError
from engine_ext.wire.vllm_compat import build_async_engine_client_from_engine_args
from machine.process_watch import mark_engine

logger = logging.getLogger(__name__)

PAGE_TOKENS: Final = 32
"""Tokens in a page of the pool; a chunk takes whole pages."""
SWITCHED_OFF: Final = "switched off by --chunk-cache off"
_PLACED: dict[PlacementName, str] = {"in-place": "shared in place", "attend": "attended to in the pool"}
MakeRenderer = Callable[[Any, int | None], Any]
"""Wraps vLLM's prompt renderer; the number is the tokens of the blocks that segments fill, if blocks are shared."""
Quotas = Callable[[str, int], Quota]
"""Gives an owner's quota of a pool, whose bytes per page are the second argument."""


def no_quotas(owner: str, page_bytes: int) -> Quota:
    """No limit for any owner."""
    return Quota()


@dataclass(frozen=True, slots=True)
class ChunkCacheOptions:
    """Start-up options of the chunk cache. ``pool_bytes`` is per worker, on its device; ``None``: the default."""

    use: ChunkCacheUse = "on"
    pool_bytes: int | None = None
    placement: PlacementName = "copy"
    strategy: DefaultStrategy | None = None
    """Default of requests that name none; ``None``: the model's."""
    eviction: EvictionPolicyName = "s3fifo"
    shares: bool = False
    """Whether replicas may exchange KV."""
    chunk_adapter: Path | None = None
    """Folder of the adapter that runs where chunks are computed."""
    tiers: tuple[str, ...] = ()
    """URLs of tiers, the fastest first (:mod:`cache.tiers.config`)."""
    tier_key: TierKey | None = None
    """Signs the files of tiers that outlive the process, and is asked for in those that are read."""
    probe_layers: tuple[int, ...] = ()
    """Layers that measure the question's attention to chunks; empty: the middle third."""
    needs_attention: bool = False
    """Whether requests recompute windows, or keep some chunks, unless they say otherwise."""
    decode_budget: int | None = None
    """Tokens that a generated token attends to; ``None``: all."""
    connector_class: str = "engine_ext.core.connector.ChunkCacheConnector"
    worker_extension_class: str = "engine_ext.core.worker_extension.ChunkCacheWorkerExtension"


class RequiredCacheError(Exception):
    """The chunk cache is required, and off; the message is the reason. The engine has ended, or was not started."""


@asynccontextmanager
async def start_chunk_engine(
    engine_args: AsyncEngineArgs,
    options: ChunkCacheOptions,
    make_renderer: MakeRenderer = lambda renderer, _: renderer,
    quotas: Quotas = no_quotas,
    begin: Callable[[str], None] = lambda stage: None,
) -> AsyncIterator[ChunkEngine]:
    """A running engine; shut down at the end. The cache is on only if the start-up self-check passed.

    ``make_renderer`` puts a prompt renderer around vLLM's; ``begin`` is told the stages behind vLLM's start. Raises
    :class:`RequiredCacheError`, before it loads the model where the reason is known by then, and
    :class:`UnsupportedFlagError`.
    """
    mark_engine()
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="tessera-"))
        path = options.chunk_adapter
        adapter = ChunkAdapter.read(path, Path(folder) / "adapter") if path is not None else None
        strategy, reason = _attached_connector(engine_args, options, folder, adapter)
        if reason is not None and options.use == "require":
            raise RequiredCacheError(reason)
        llm = await stack.enter_async_context(build_async_engine_client_from_engine_args(engine_args))
        if reason is None:
            begin(CHECKING)
        pool = reason or await _checked_pool(llm, options, strategy, adapter)
        if isinstance(pool, str):
            if options.use == "require":
                raise RequiredCacheError(pool)
            logger.log(logging.INFO if options.use == "off" else logging.WARNING, "chunk cache off: %s", pool)
            yield ChunkEngine(llm, CacheOff(pool), strategy, make_renderer(llm.renderer, None))
            return
        pool, renderer = _with_renderer(llm, pool, make_renderer)
        cache = await stack.enter_async_context(_running_cache(llm, folder, pool, options, quotas))
        exchanges = bool(pass_on_blocks(llm.vllm_config.kv_transfer_config))
        yield ChunkEngine(
            llm, cache, strategy, renderer, exchanges_requests=exchanges, decode_budget=pool.decode_budget
        )


def _attached_connector(
    engine_args: AsyncEngineArgs, options: ChunkCacheOptions, folder: str, adapter: ChunkAdapter | None
) -> tuple[DefaultStrategy, str | None]:
    """Adds connector and worker extension to the engine's arguments, or returns the reason against it.

    ``folder`` is for the workers' sockets.
    """
    if options.use == "off":
        return UNKNOWN, SWITCHED_OFF
    asked = options.strategy.strategy if options.strategy is not None else None
    model = model_config(engine_args, asked)
    trained_for = adapter.positions if adapter is not None else getattr(model.hf_config, TRAINED_FOR, ())
    strategy = options.strategy or strategy_for(trained_for)
    in_place = options.placement == "in-place"
    if reason := unsupported_reason(engine_args, model, in_place=in_place):
        return strategy, reason
    pool_bytes = make_room(engine_args, options.pool_bytes)
    if isinstance(pool_bytes, str):
        return strategy, pool_bytes
    if adapter is not None:
        adapter.enable(engine_args)
    drops = drops_blocks(engine_args, model, in_place=in_place)
    engine_args.disable_hybrid_kv_cache_manager = not drops
    if drops and options.tiers:
        logger.warning("only chunks are kept in tiers, not other prompts: vLLM drops blocks behind attention windows")
    extra_config = {"pool_bytes": pool_bytes, "page_tokens": PAGE_TOKENS}
    prefix_folder = folder if options.tiers and not drops else None
    attach_connector(engine_args, options.connector_class, extra_config, prefix_folder)
    engine_args.worker_extension_cls = beside(options.worker_extension_class, engine_args.worker_extension_cls)
    extend_backends(attends=options.placement == "attend")
    return strategy, None


def beside(extension: str, other: str) -> str:
    """The path of an extension and ``other``, if there is one, as one class."""
    return f"{extension.rpartition('.')[0]}.{other.replace('.', ':')}" if other else extension


@dataclass(frozen=True, slots=True)
class _Pool:
    """A pool that passed the self-check; ``weights`` is their digest, ``None`` if KV must not leave the process.

    Fills of chunks carry ``adapter``.
    """

    config: ChunkCacheConfig
    weights: str | None
    adapter: LoRARequest | None
    reindexer: PositionReindexer
    no_attention: str | None
    decode_budget: int | None


async def _checked_pool(
    llm: AsyncLLM, options: ChunkCacheOptions, strategy: DefaultStrategy, adapter: ChunkAdapter | None
) -> _Pool | str:
    if reason := turning_reason(llm.vllm_config.cache_config.cache_dtype, strategy):
        return reason
    weights = await _weights(llm.vllm_config) if options.shares or options.tiers else None
    config = await prepare_pool(llm, options, weights, adapter.digest if adapter is not None else "")
    if isinstance(config, str):
        return config
    loaded = await adapter.load(llm) if adapter is not None else None
    not_attending, no_attention = await _no_attention(llm, config, options)
    reindexer = await _reindexer(llm, config, options, strategy, not_attending)
    decode_budget = await _decode_budget(llm, options.decode_budget, attends=reindexer.placement == "attend")
    return _Pool(config, weights, loaded, reindexer, no_attention, decode_budget)


def _with_renderer(llm: AsyncLLM, pool: _Pool, make: MakeRenderer) -> tuple[_Pool, Any]:
    """The prompt renderer; requests copy their chunks if it can't fill blocks."""
    is_in_place = pool.reindexer.placement == "in-place"
    renderer = make(llm.renderer, pool.reindexer.block_tokens if is_in_place else None)
    if not is_in_place or getattr(renderer, "can_pad", True):
        return pool, renderer
    logger.warning(
        "chunks are copied, not shared in place: the tokenizer has no token of white space to fill blocks with"
    )
    return replace(pool, reindexer=replace(pool.reindexer, placement="copy", block_tokens=1)), renderer


@asynccontextmanager
async def _running_cache(
    llm: AsyncLLM, folder: str, pool: _Pool, options: ChunkCacheOptions, quotas: Quotas
) -> AsyncIterator[ChunkCache]:
    config = pool.config
    files = opened_transfers(
        llm,
        folder,
        config,
        options.tiers,
        options.tier_key,
        keeps_prefixes=keeps_prefixes(llm.vllm_config.kv_transfer_config),
    )
    async with files if pool.weights is not None else nullcontext() as transfers:
        cache = ChunkCache(
            llm,
            config,
            adapter=pool.adapter,
            transfers=transfers,
            tiers=_tier_sizes(options.tiers, len(transfers.parts.of_workers) if transfers is not None else 1),
            reindexer=pool.reindexer,
            no_attention=pool.no_attention,
            quota_of=lambda owner: quotas(owner, config.page_bytes),
        )
        async with cache.running():
            yield cache


def _tier_sizes(urls: Sequence[str], num_workers: int) -> dict[str, int]:
    """Bytes of the tiers on all workers together; host memory is each worker's own."""
    return {scheme: size * (num_workers if scheme == MemoryTier.name else 1) for scheme, size in map(size_of, urls)}


async def prepare_pool(
    llm: AsyncLLM, options: ChunkCacheOptions, weights: str | None = None, adapter: str = ""
) -> ChunkCacheConfig | str:
    """The configuration of a pool that passed the self-check, or the reason against it.

    ``weights`` and ``adapter`` are digests.
    """
    pools: list[dict[str, Any]] = await llm.collective_rpc("chunk_cache_prepare")
    if reasons := [pool["reason"] for pool in pools if "reason" in pool]:
        return str(reasons[0])
    config = ChunkCacheConfig(
        num_pages=min(pool["num_pages"] for pool in pools),
        page_tokens=PAGE_TOKENS,
        fingerprint=engine_fingerprint(llm.vllm_config, weights, adapter),
        num_workers=len(pools),
        eviction=options.eviction,
        page_bytes=sum(pool["page_bytes"] for pool in pools),
        block_order="; ".join(sorted({pool["block_order"] for pool in pools})),
        adapter=adapter,
    )
    if reason := await _failure(SelfCheck(llm, config, llm.model_config.get_sliding_window()).run()):
        return reason
    tokens = config.num_pages * PAGE_TOKENS
    logger.info("chunk cache on: %d tokens in %d pages, self-check passed", tokens, config.num_pages)
    return config


async def _no_attention(
    llm: AsyncLLM, pool: ChunkCacheConfig, options: ChunkCacheOptions
) -> tuple[str | None, str | None]:
    """Let requests attend to chunks in the pool, and measure it; returns the reasons if they can't do either."""
    attends = options.placement == "attend"
    not_attending = await refused(llm, "chunk_cache_prepare_attention", on_gpus=attends)
    not_attending = not_attending or await _failure(SelfCheck(llm, pool).run_attention())
    reason = not_attending or await refused(llm, "chunk_cache_prepare_probes", options.probe_layers)
    if reason is not None and options.needs_attention:
        logger.warning("requests that choose chunks or windows run in full attention: %s", reason)
    return not_attending, reason


async def _reindexer(
    llm: AsyncLLM,
    pool: ChunkCacheConfig,
    options: ChunkCacheOptions,
    strategy: DefaultStrategy,
    not_attending: str | None,
) -> PositionReindexer:
    """Places segments as ``options`` ask, if that passes its self-check; chunks are copied otherwise."""
    config = llm.vllm_config
    copying = PositionReindexer(window=window_of(config.model_config), is_quantized=is_quantized(config))
    block_tokens: int = config.cache_config.block_size
    match options.placement:
        case "copy":
            return copying
        case "in-place":
            reason = await in_place_refusal(llm, pool)
            if reason is None and strategy.strategy is not PositionStrategy.PARALLEL:
                logger.warning(
                    "requests copy their chunks unless they ask for parallel positions; the default is %s", strategy.why
                )
        case "attend":
            reason = not_attending
    if reason is not None:
        logger.warning("chunks are copied, not %s: %s", _PLACED[options.placement], reason)
        return copying
    return replace(copying, placement=options.placement, block_tokens=block_tokens)


async def _decode_budget(llm: AsyncLLM, budget_tokens: int | None, *, attends: bool) -> int | None:
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


async def refused(llm: AsyncLLM, method: str, *args: Any, on_gpus: bool = False) -> str | None:
    """Prepares the workers' attention by ``method``; returns the engine's or the first worker's reason against it."""
    return attention_reason(llm.vllm_config, on_gpus=on_gpus) or await _workers_reason(llm, method, *args)


async def _workers_reason(llm: AsyncLLM, method: str, *args: Any) -> str | None:
    """The first worker's reason that ``method`` returns, if any does."""
    reasons: list[str | None] = await llm.collective_rpc(method, args=args)
    return next(filter(None, reasons), None)


async def in_place_refusal(llm: AsyncLLM, pool: ChunkCacheConfig) -> str | None:
    """The engine's, a worker's or the self-check's reason against sharing chunks in place, if there is one."""
    reason = in_place_reason(llm.vllm_config) or await _workers_reason(llm, "chunk_cache_in_place_reason")
    return reason or await _failure(SelfCheck(llm, pool).run_in_place(llm.vllm_config.cache_config.block_size))


async def _failure(check: Awaitable[None]) -> str | None:
    """The reason why a self-check failed; ``None`` if it passed."""
    try:
        await check
    except EngineDeadError:
        raise
    except Exception as error:
        # Not always a difference, but no proof of exactness either (a model length below the check's prompts, say).
        kind = "" if isinstance(error, SelfCheckError) else f"{type(error).__name__}: "
        return f"self-check failed: {kind}{error}"
    return None


async def _weights(config: VllmConfig) -> str | None:
    """Digest of the model's weights; ``None`` if unknown: then nothing is shared."""
    try:
        return await asyncio.to_thread(weights_digest, config.model_config, config.load_config)
    except (UnknownWeightsError, OSError) as error:
        logger.warning("chunks are neither stored nor shared: %s", error)
        return None
