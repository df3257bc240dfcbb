# SPDX-License-Identifier: Apache-2.0
"""A replica of the engine's deployment: Tessera in a Ray actor, without an HTTP server."""

import json
import os
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from ray import serve
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.cluster.router.forwarding import REPLICA_HEADER
from app.cluster.router.proxy import unavailable
from app.ray_serve.exchange import RequestHead, answered, wished_replica
from app.ray_serve.request_router import Hint

if TYPE_CHECKING:
    import argparse

    from app.settings import Settings


class EngineReplica:
    """Answers requests from an ingress. Its name in the registry is Ray's name for it."""

    async def __init__(self, arguments: list[str]) -> None:  # type: ignore[misc]  # Serve awaits it
        """Starts the engine. ``arguments`` are those of ``tessera serve``."""
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        from app.cluster.registration import registered
        from app.server import prepare, started_app

        self._running = AsyncExitStack()
        self.name = str(serve.get_replica_context().replica_id.unique_id)
        args, settings = _parsed([*arguments, *_presence(self.name)])
        prepare(args, settings)
        app, self._engine = await self._running.enter_async_context(started_app(args, settings))
        app.state.server = _Actor()
        self._app = named(app, self.name)
        await self._running.enter_async_context(app.router.lifespan_context(app))
        await self._running.enter_async_context(registered(app.state, args))

    async def handle(
        self, head: RequestHead, body: bytes, hint: Hint | None = None
    ) -> AsyncGenerator[list[Message], None]:
        """Streams the response in lists of ASGI messages. ``hint`` is for the router only."""
        async with aclosing(answered(self._app, head, body)) as batches:
            async for batch in batches:
                yield batch

    async def ask(self, head: RequestHead, body: bytes) -> tuple[str, int, Any]:
        """This replica's name, with status and JSON of a whole response."""
        status, parts = int(HTTPStatus.INTERNAL_SERVER_ERROR), []
        async for batch in answered(self._app, head, body):
            for message in batch:
                status = message.get("status", status)
                parts.append(message.get("body", b""))
        return self.name, status, json.loads(b"".join(parts))

    async def check_health(self) -> None:
        """Raises if the engine has died, so that Ray replaces this replica."""
        await self._engine.check_health()

    async def __del__(self) -> None:
        """Ends the engine. Ray awaits this when it stops a replica, after the last request."""
        await self._running.aclose()


def named(app: ASGIApp, name: str) -> ASGIApp:
    """Adds the replica's name to responses, and refuses requests for another replica."""

    async def asgi(scope: Scope, receive: Receive, send: Send) -> None:
        async def adding(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (REPLICA_HEADER, name.encode())]
            await send(message)

        wished = wished_replica(scope["headers"])
        answering = app if wished in (None, name) else unavailable(f"no replica named {wished!r}")
        await answering(scope, receive, adding)

    return asgi


def _presence(name: str) -> list[str]:
    """Flags for a replica's registration. Its URL is a dummy, since only Ray's handles reach it."""
    return ["--replica-name", name, "--advertise-url", f"http://{name}.ray.invalid"]


def _parsed(arguments: list[str]) -> "tuple[argparse.Namespace, Settings]":
    """Parses flags; raises ``ValueError`` for unknown ones, since an exit would leave Ray waiting."""
    from app.arguments import parse
    from app.settings import load_settings

    try:
        args = parse(arguments)
    except SystemExit as error:
        raise ValueError(f"not arguments of tessera serve: {' '.join(arguments)}") from error
    args.model = args.model_tag
    return args, load_settings(args)


class _Actor:
    """Stands in for the HTTP server that vLLM stops after engine death: ends this process."""

    @property
    def should_exit(self) -> bool:
        return False

    @should_exit.setter
    def should_exit(self, value: bool) -> None:
        os._exit(1)
