# SPDX-License-Identifier: Apache-2.0
"""The router's HTTP application."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from app.access.client_limits import ClientLimitsMiddleware
from app.access.middleware import AccessMiddleware
from app.access.tenants import Tenants
from app.cluster.router.broadcast import Broadcast
from app.cluster.router.chooser import Chooser
from app.cluster.router.directory import Directory
from app.cluster.router.metrics import RouterMetrics
from app.cluster.router.proxy import Proxy, http_client
from app.cluster.router.settings import RouterSettings
from app.http.refusals import refusal
from replicas.redis_registry import RedisRegistry
from web import page


def build_app(settings: RouterSettings, tenants: Tenants | None = None) -> FastAPI:
    """The application; raises ``ValueError`` if the registry's URL is none."""
    registry = RedisRegistry(settings.registry, prefix=settings.registry_prefix, timeout_s=settings.registry_timeout)
    metrics, client = RouterMetrics(), http_client()
    directory = Directory(registry, client, metrics)
    chooser = Chooser(directory, metrics, settings.chunk_separator)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await directory.refresh()
        task = asyncio.create_task(directory.run(), name="directory")
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            await client.aclose()
            await registry.close()

    app = FastAPI(title="Tessera router", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)

    @app.get("/health")
    async def health() -> Response:
        """OK while there is a replica that gets requests."""
        status = HTTPStatus.OK if directory.replicas else HTTPStatus.SERVICE_UNAVAILABLE
        return JSONResponse({"replicas": len(directory.replicas)}, status)

    @app.get("/metrics")
    async def exported() -> Response:
        return Response(generate_latest(metrics.collected), media_type=CONTENT_TYPE_LATEST)

    @app.get("/v1/cluster")
    async def cluster() -> dict[str, Any]:
        """The replicas, and why the last requests went where they did."""
        return {
            "registry": {"up": directory.is_up, "invalid_entries": registry.num_invalid},
            "replicas": [
                {**replica.to_dict(), "requests_here": chooser.in_flight[replica.url]} for replica in directory.replicas
            ],
            "decisions": [decision.to_dict() for decision in chooser.decisions],
        }

    @app.get("/peer/{_:path}")
    async def peer(_: str) -> Response:
        """Replicas ask one another, and not through a router."""
        return refusal(HTTPStatus.NOT_FOUND, "not_found", "only replicas have this")

    app.state.tessera_tenants, app.state.tessera_settings = tenants, settings
    for each in (ClientLimitsMiddleware, AccessMiddleware):  # the last one is outside
        app.add_middleware(each)
    app.include_router(page.router)
    proxy = Proxy(chooser, directory, client, metrics)
    everywhere = Broadcast(directory, client, proxy)
    app.mount("/", everywhere)
    return app
