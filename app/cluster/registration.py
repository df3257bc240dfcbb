# SPDX-License-Identifier: Apache-2.0
"""Registers this replica while it takes requests."""

import argparse
import logging
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from functools import partial

import httpx
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette.datastructures import State

from app.cluster.peers import Peers
from app.cluster.prefillers import Prefillers
from app.context import ServerContext
from app.prometheus import exported
from app.settings import Settings
from engine_ext.chunks.cache_off import CacheOff
from engine_ext.chunks.chunk_cache import ChunkCache
from engine_ext.wire.vllm_compat import num_unfinished_requests
from machine.beside import beside
from machine.http_client import CONNECTIONS
from machine.progress import say
from replicas.peer_file import FINGERPRINT_HEADER
from replicas.publisher import Publisher
from replicas.registry import Registry, Replica
from replicas.signing import PeerAuth, PeerKey
from replicas.storage import storage_ids

logger = logging.getLogger(__name__)

_CONNECT_S = 2.0


@asynccontextmanager
async def registered(state: State, args: argparse.Namespace) -> AsyncIterator[None]:
    """Publishes this replica, even without a chunk cache, if there is a registry."""
    context: ServerContext = state.tessera
    if (registry := context.registry) is None:
        yield
        return
    publisher = Publisher(registry, _description(state, args), context.engine.cache.holdings)
    try:
        with exported(partial(publisher_metrics, publisher)):
            async with beside(publisher.run()), _fetching(context, registry, publisher):
                yield
    finally:
        await registry.close()


@asynccontextmanager
async def _fetching(context: ServerContext, registry: Registry, publisher: Publisher) -> AsyncIterator[None]:
    """Adds other replicas as a source of missing chunks, if sharing is on."""
    cache, settings = context.engine.cache, context.settings
    secret = settings.peer_secret
    if isinstance(cache, CacheOff) or cache.transfers is None or secret is None:
        yield
        return
    headers, auth = {FINGERPRINT_HEADER: cache.config.peer_fingerprint}, PeerAuth(PeerKey(secret.get_secret_value()))
    timeout = httpx.Timeout(None, connect=_CONNECT_S)
    async with httpx.AsyncClient(
        headers=headers, auth=auth, timeout=timeout, limits=CONNECTIONS, trust_env=False
    ) as client:
        peers = Peers(
            registry,
            lambda: publisher.replica_id,
            cache.config,
            cache.metrics,
            lambda: cache.transfers,
            cache.costs,
            secret.get_secret_value(),
            is_eager=settings.role == "decode",
        )
        with cache.fills.also_from(peers), ExitStack() as stack:
            if settings.role == "decode":
                stack.enter_context(cache.fills.also_from(Prefillers(peers, client)))
            yield


def _description(state: State, args: argparse.Namespace) -> Callable[[str], Replica | None]:
    """Makes the function that describes the replica for a heartbeat; ``None`` when stopping."""
    context: ServerContext = state.tessera
    engine, settings = context.engine, context.settings
    url = settings.advertise_url or _own_url(args)
    name = settings.replica_name or f"{socket.gethostname()}:{args.port}"
    hands_over = engine.exchanges_requests and settings.peer_secret is not None
    storages = _storages(engine.cache, settings)

    def describe(id: str) -> Replica | None:
        if engine.is_stopping:
            return None
        held = capacity = 0
        is_sharing, fingerprint = engine.cache.transfers is not None, ""
        if not isinstance(cache := engine.cache, CacheOff):
            fingerprint = cache.config.peer_fingerprint if is_sharing else ""
            capacity = cache.num_tokens
            held = capacity - cache.manager.pool.num_free * cache.config.page_tokens
        load = num_unfinished_requests(engine.llm)
        return Replica(
            id,
            name,
            url,
            _models(state),
            fingerprint,
            load,
            held,
            capacity,
            settings.role,
            hands_over,
            storages if is_sharing else (),
        )

    return describe


def _storages(cache: ChunkCache | CacheOff, settings: Settings) -> tuple[str, ...]:
    """Ids of the tiers that other replicas may share."""
    if isinstance(cache, CacheOff):
        return ()
    try:
        return storage_ids(settings.tiers(), cache.config.fingerprint)
    except OSError as error:
        logger.warning("the registry is not told of chunks in tiers: %s", error)
        return ()


def publisher_metrics(publisher: Publisher) -> Iterator[Metric]:
    """State of the registry, and counters of what was published."""
    is_up = bool(publisher.is_up)
    yield GaugeMetricFamily("tessera_registry_up", "Whether the last update of the registry succeeded", is_up)
    published, errors = publisher.num_published, publisher.num_errors
    yield CounterMetricFamily("tessera_registry_published", "Changes published in the registry", published)
    yield CounterMetricFamily("tessera_registry_errors", "Times that the registry was lost", errors)


def _models(state: State) -> tuple[str, ...]:
    """Valid values of a request's ``model``: base model and LoRA adapters."""
    served = state.openai_serving_models
    return (*(path.name for path in served.base_model_paths), *served.lora_requests)


def _own_url(args: argparse.Namespace) -> str:
    scheme, host = "https" if args.ssl_certfile else "http", args.host
    if host in (None, "", "0.0.0.0", "::"):
        host = socket.getfqdn()
        say(f"routers are told {scheme}://{host}:{args.port}; set --advertise-url if they can't reach it")
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{args.port}"
