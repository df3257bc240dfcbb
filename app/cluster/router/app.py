# SPDX-License-Identifier: Apache-2.0
"""The router's HTTP application."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, FastAPI, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from app.access.client_limits import ClientLimitsMiddleware
from app.access.exposure import browser_check
from app.access.middleware import AccessMiddleware
from app.access.tenants import Tenants
from app.cluster.router.broadcast import Broadcast
from app.cluster.router.chooser import Chooser
from app.cluster.router.directory import Directory
from app.cluster.router.metrics import RouterMetrics
from app.cluster.router.prefill import Prefill
from app.cluster.router.proxy import Proxy, http_client
from app.cluster.router.settings import RouterSettings
from app.documents.request_documents import Reading
from app.http.messages import PlainPathsMiddleware
from machine.beside import beside
from replicas.redis_registry import RedisRegistry
from replicas.signing import PeerKey
from web import page


def build_app(settings: RouterSettings, tenants: Tenants | None = None) -> FastAPI:
    """The application; raises :class:`PatternError`, or ``ValueError`` for a bad URL of the registry."""
    reading = Reading.of(settings.chunk_separator, settings.chunk_scope, settings.documents)
    key = PeerKey(settings.peer_secret.get_secret_value()) if settings.peer_secret is not None else None
    registry = RedisRegistry(settings.registry, key)
    metrics, client = RouterMetrics(), http_client()
    directory = Directory(registry, client, metrics)
    chooser = Chooser(directory, metrics, reading)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await directory.refresh()  # before the first request
        async with beside(directory.run()):
            yield
        await client.aclose()
        await registry.close()

    app = FastAPI(title="Tessera router", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.include_router(_endpoints(registry, directory, chooser, metrics))
    app.add_middleware(ClientLimitsMiddleware, max_body_size=settings.max_body_size)
    browsers = browser_check(tenants, [settings.host], settings.names())
    app.add_middleware(AccessMiddleware, tenants=tenants, browsers=browsers)  # outside, before anything reads the body
    app.add_middleware(PlainPathsMiddleware)
    app.include_router(page.pages())
    prefill = Prefill(chooser, client, metrics, key)
    app.mount("/", Broadcast(directory, client, Proxy(chooser, prefill, directory, client, metrics)))
    return app


def _endpoints(registry: RedisRegistry, directory: Directory, chooser: Chooser, metrics: RouterMetrics) -> APIRouter:
    """The router's own endpoints."""
    router = APIRouter()

    @router.get("/health")
    async def health() -> Response:
        """200 while any replica gets requests."""
        status = HTTPStatus.OK if directory.replicas else HTTPStatus.SERVICE_UNAVAILABLE
        return JSONResponse({"replicas": len(directory.replicas)}, status)

    @router.get("/metrics")
    async def exported() -> Response:
        return Response(generate_latest(metrics.collected), media_type=CONTENT_TYPE_LATEST)

    @router.get("/v1/cluster")
    async def cluster() -> dict[str, Any]:
        """The replicas, and why the last requests went where they did."""
        replicas = [{**each.to_dict(), "requests_here": chooser.in_flight[each.url]} for each in directory.replicas]
        return {
            "registry": {"up": bool(directory.is_up), "invalid_entries": registry.num_invalid},
            "replicas": replicas,
            "decisions": list(map(asdict, chooser.decisions)),
        }

    return router
