# SPDX-License-Identifier: Apache-2.0
"""Assembles the application around one engine and serves it until a signal."""

import argparse
import asyncio
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, closing
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

from fastapi import FastAPI
from starlette.datastructures import State
from vllm import envs
from vllm.engine.arg_utils import AsyncEngineArgs

from app.access.client_limits import BoundedProtocol, ClientLimitsMiddleware
from app.access.exposure import browser_check, checked_host, known_tenants
from app.access.middleware import AccessMiddleware
from app.access.tenants import Tenants
from app.advice import off_message
from app.cluster.registration import registered
from app.collections.retrieval import make_retrieval
from app.context import ServerContext
from app.documents.extraction import Extraction
from app.documents.patterns import patterns_of
from app.errors import answer_errors
from app.http.cut_off import CutOffMiddleware
from app.http.messages import PlainPathsMiddleware, hand_over
from app.http.openapi import correct_openapi
from app.http.refusals import RefusalMiddleware
from app.intake import CheckedFieldsMiddleware, DocumentsMiddleware
from app.logs import configure_logging
from app.modes import strategy_of
from app.profile import Profile, ProfileError
from app.prometheus import chunk_cache_metrics, exported
from app.prompt.marks import Marks
from app.prompt.segments import SegmentRenderer
from app.routes import cache, chunks, cluster, collections, peer, rag, split
from app.settings import Settings
from cache.positions.strategy import DefaultStrategy
from cache.tiers.config import make_tier
from cache.tiers.signed import TierKey
from engine_ext.chunks.cache_off import CacheOff
from engine_ext.client.engine import ChunkEngine
from engine_ext.client.position_limit import longest_chunk
from engine_ext.start.fingerprint import weights_digest
from engine_ext.start.memory import set_cpu_defaults
from engine_ext.start.stages import told_stages
from engine_ext.start.startup import ChunkCacheOptions, no_quotas, start_chunk_engine
from engine_ext.start.support import check_flags
from engine_ext.start.vllm_log import log_file
from engine_ext.start.weights import UnknownWeightsError
from engine_ext.wire.vllm_compat import build_app, init_app_state, serve_http, setup_server, version_warning
from machine.beside import beside
from machine.progress import progress, say
from replicas.redis_registry import RedisRegistry
from replicas.signing import PeerKey
from web import page
from web.example import example_file

GRACE_S = 1
"""Seconds that responses may continue after the engine has stopped (after vLLM's ``--shutdown-timeout``)."""


async def build_tessera_app(args: argparse.Namespace, context: ServerContext, tenants: Tenants | None) -> FastAPI:
    """vLLM's app with Tessera's routers and middleware."""
    engine, settings = context.engine, context.settings
    supported_tasks = await engine.llm.get_supported_tasks()
    app: FastAPI = build_app(args, supported_tasks, engine.model_config)
    app.title = "Tessera"
    for module in (rag, collections, split, chunks, cache, cluster, *([peer] if settings.peer_secret else [])):
        app.include_router(module.router)
    app.include_router(page.pages(page.read(example_file(args.model))))
    answer_errors(app)
    correct_openapi(app)
    hand_over(app)
    app.middleware_stack = None  # vLLM has built its own; the first request builds it again
    # Each wraps those before it, and vLLM's.
    app.add_middleware(CheckedFieldsMiddleware, engine=engine)
    app.add_middleware(DocumentsMiddleware, context=context)
    app.add_middleware(ClientLimitsMiddleware, max_body_size=settings.max_body_size)
    app.add_middleware(CutOffMiddleware, engine=engine)  # also ends requests whose bodies still come
    browsers = browser_check(tenants, [args.host, _advertised(settings)], settings.names(), args.allowed_origins)
    app.add_middleware(AccessMiddleware, tenants=tenants, secret=settings.peer_secret, browsers=browsers)
    app.add_middleware(RefusalMiddleware)
    app.add_middleware(PlainPathsMiddleware)
    app.state.tessera = context
    await init_app_state(engine, app.state, args, supported_tasks)
    return app


def _advertised(settings: Settings) -> str | None:
    """The name by which routers ask."""
    return urlsplit(settings.advertise_url).hostname if settings.advertise_url else None


def _registry(settings: Settings) -> RedisRegistry | None:
    if settings.registry is None:
        return None
    secret = settings.peer_secret
    return RedisRegistry(settings.registry, PeerKey(secret.get_secret_value()) if secret is not None else None)


async def _check_model(profile: Profile, engine: ChunkEngine) -> None:
    """Raises :class:`ProfileError` unless ``profile`` is of the engine's model."""
    try:
        config = engine.vllm_config
        weights = await asyncio.to_thread(weights_digest, config.model_config, config.load_config)
    except (UnknownWeightsError, OSError) as error:
        raise ProfileError(f"can't tell whether the profile is of this model: {error}") from error
    if weights != profile.weights:
        raise ProfileError(f"the profile is of {profile.model}, which has other weights than this model")
    if not isinstance(engine.cache, CacheOff) and profile.adapter != engine.cache.config.adapter:
        raise ProfileError("the profile was measured with another --chunk-adapter than this one, or without")


async def run(args: argparse.Namespace, settings: Settings) -> int:
    """Serves until SIGINT, SIGTERM or the engine's death; returns the exit code, 0 or 1.

    All processes that it started have ended when it returns.
    """
    started = time.monotonic()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, abandon_start)  # until the HTTP server handles signals itself
    prepare(args, settings)
    url, sock = setup_server(args, reuse_port=False)
    claim = claim_address(url)
    if warning := version_warning():
        say(warning)
    try:
        async with (
            started_app(args, settings) as (app, engine),
            beside(_announce(app.state, lambda: _tell_ready(engine, url, started, settings), args)),
        ):
            shutdown = await serve_http(app, sock=sock, **_uvicorn_options(args))
            has_died = engine.has_died
        await shutdown
    finally:
        sock.close()
        claim.close()
    say(f"the engine has died; its log is {log_file() or 'above'}" if has_died else "stopped")
    return int(has_died)


def claim_address(url: str) -> socket.socket:
    """Claims a URL for one server of this machine. Raises ``OSError`` (``EADDRINUSE``) if it is taken.

    The system lets several servers bind a port until one of them listens, which is after its model is loaded.
    """
    claim = socket.socket(socket.AF_UNIX)
    # An abstract name, not a file: it belongs to the network namespace, as ports do, and ends with the process.
    claim.bind(f"\0tessera-{sha256(url.encode()).hexdigest()}")
    return claim


def prepare(args: argparse.Namespace, settings: Settings) -> None:
    """Prepares arguments and logging before the engine starts.

    Raises :class:`UnsupportedFlagError`, :class:`TierConfigError`, :class:`ExposedError`, :class:`TenantsFileError`.
    """
    configure_logging(settings)
    if args.served_model_name is None and (folder := Path(args.model)).is_dir():
        args.served_model_name = [folder.resolve().name]
    args.host = checked_host(args.host, _tenants(args, settings), allow_anonymous=settings.allow_anonymous)
    set_cpu_defaults(args)
    check_flags(args)
    for url in settings.tiers():
        make_tier(url).close()  # fails early; each worker makes its own


@asynccontextmanager
async def started_app(args: argparse.Namespace, settings: Settings) -> AsyncIterator[tuple[FastAPI, ChunkEngine]]:
    """The application and its running engine, which ends with the context.

    What the flags name is read before the engine starts. Raises :class:`TierConfigError`, :class:`PatternError`,
    :class:`ProfileError`, :class:`UnknownRetrieverError`.
    """
    profile, tenants = _profile(args.model, settings), _tenants(args, settings)
    retrieval, patterns, marks = make_retrieval(settings), patterns_of(settings.documents), Marks()

    def renderer(vllms: Any, block_tokens: int | None) -> SegmentRenderer:
        model = vllms.model_config
        most_tokens = min(settings.chunk_max_tokens, longest_chunk(model))
        return SegmentRenderer(vllms, marks, most_tokens, block_tokens, model.max_model_len)

    options = _cache_options(settings, profile)
    quotas = tenants.quota_of if tenants is not None else no_quotas
    async with AsyncExitStack() as stack:
        with progress(f"starting the engine with {args.model}") as shown, told_stages(shown) as begin:
            starting = start_chunk_engine(AsyncEngineArgs.from_cli_args(args), options, renderer, quotas, begin)
            engine = await stack.enter_async_context(starting)
        stack.enter_context(exported(partial(chunk_cache_metrics, engine, wanted=settings.chunk_cache != "off")))
        if profile is not None:
            if settings.profile is not None:  # one beside the model was read with its weights
                await _check_model(profile, engine)
            profile = profile.placed(engine.cache.placement, measures_attention=engine.cache.no_attention is None)
        decided = {
            "chunk_mode": settings.chunk_mode or engine.strategy.strategy.value,
            "chunk_max_tokens": min(settings.chunk_max_tokens, longest_chunk(engine.model_config)),
        }
        extraction = stack.enter_context(closing(Extraction(engine.renderer.tokenizer_json)))
        context = ServerContext(
            engine,
            settings.model_copy(update=decided),
            retrieval,
            patterns,
            marks,
            extraction,
            profile,
            _registry(settings),
        )
        yield await build_tessera_app(args, context, tenants), engine


def _cache_options(settings: Settings, profile: Profile | None) -> ChunkCacheOptions:
    pool = settings.chunk_cache_memory
    return ChunkCacheOptions(
        use=settings.chunk_cache,
        pool_bytes=None if pool is None else int(pool),  # workers tell it, and vLLM's messages have no ByteSize
        placement=settings.chunk_cache_placement,
        strategy=_strategy(settings, profile),
        eviction=settings.chunk_cache_eviction,
        tiers=tuple(settings.tiers()),
        tier_key=None if settings.tier_key is None else TierKey.read(settings.tier_key),
        probe_layers=settings.probe_layers(),
        needs_attention=settings.needs_attention or (profile is not None and profile.needs_attention),
        decode_budget=settings.decode_sparse_budget,
        chunk_adapter=settings.chunk_adapter,
        shares=settings.registry is not None and settings.peer_secret is not None,
    )


async def _announce(state: State, tell_ready: Callable[[], None], args: argparse.Namespace) -> None:
    """Tells that the server is ready once it accepts connections, then registers the replica until cancelled."""
    while not getattr(getattr(state, "server", None), "started", False):
        await asyncio.sleep(0.05)
    tell_ready()
    async with registered(state, args):
        await asyncio.Event().wait()


def _tenants(args: argparse.Namespace, settings: Settings) -> Tenants | None:
    return known_tenants(settings.tenants, args.api_key or [key for key in (envs.VLLM_API_KEY,) if key])


def _profile(model: str, settings: Settings) -> Profile | None:
    """The profile of ``--profile``; else that in the model's folder, unless another flag decides what it would."""
    if settings.profile is not None:
        return Profile.read(settings.profile)
    return Profile.beside(model) if settings.leaves_the_choice else None


def _strategy(settings: Settings, profile: Profile | None) -> DefaultStrategy | None:
    """The position strategy of flags or profile; ``None`` leaves it to the model."""
    if settings.chunk_mode is not None:
        return DefaultStrategy(strategy_of(settings.chunk_mode), f"--chunk-mode {settings.chunk_mode}")
    return None if profile is None else profile.placed(settings.chunk_cache_placement).strategy


def _tell_ready(engine: ChunkEngine, url: str, started: float, settings: Settings) -> None:
    """Tells where the server is; last, if the cache is off though nobody asked, what that means and what helps."""
    state = "chunk cache off"
    if not isinstance(engine.cache, CacheOff):
        state = f"chunk cache on: {engine.cache.num_tokens} tokens; placement: {engine.cache.placement}; "
        state += f"positions: {engine.strategy.described()}"
        state += f"; chunks computed with the adapter {settings.chunk_adapter}" if settings.chunk_adapter else ""
    say(f"ready at {url.replace('//0.0.0.0', '//127.0.0.1')} after {time.monotonic() - started:.0f} s ({state})")
    if isinstance(engine.cache, CacheOff) and settings.chunk_cache != "off":
        say(off_message(engine.cache.reason))


def abandon_start(number: int, _: object) -> NoReturn:
    """Ends the engine's processes and this one. The engine's wait for its processes would swallow an exception."""
    say("interrupted while starting")
    for child in multiprocessing.active_children():
        child.terminate()
        child.join(timeout=10)
        child.kill()
    os._exit(128 + number)


def _uvicorn_options(args: argparse.Namespace) -> dict[str, Any]:
    """Options of the HTTP server, as in ``vllm serve``."""
    return {
        "http": BoundedProtocol,
        "enable_ssl_refresh": args.enable_ssl_refresh,
        "host": args.host,
        "port": args.port,
        "log_level": args.uvicorn_log_level,
        "access_log": not args.disable_uvicorn_access_log,
        "timeout_keep_alive": envs.VLLM_HTTP_TIMEOUT_KEEP_ALIVE,
        "ssl_keyfile": args.ssl_keyfile,
        "ssl_certfile": args.ssl_certfile,
        "ssl_ca_certs": args.ssl_ca_certs,
        "ssl_cert_reqs": args.ssl_cert_reqs,
        "ssl_ciphers": args.ssl_ciphers,
        "timeout_graceful_shutdown": GRACE_S,
    }
