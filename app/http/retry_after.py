# SPDX-License-Identifier: Apache-2.0
"""``Retry-After`` on responses with status 503."""

from http import HTTPStatus

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

SECONDS = 1
"""Queues usually have room again within a second, and a retry is cheap: a refused request never reaches the engine.
Well-behaved clients double the time themselves."""


class RetryAfterMiddleware:
    """Adds the header to every response with status 503 that lacks it, vLLM's included."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def adding(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == HTTPStatus.SERVICE_UNAVAILABLE:
                MutableHeaders(scope=message).setdefault("retry-after", str(SECONDS))
            await send(message)

        await self._app(scope, receive, adding)
