# SPDX-License-Identifier: Apache-2.0
"""``Retry-After`` on answers that say "not now"."""

from http import HTTPStatus

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

SECONDS = 1
"""When a place in a queue comes free is not known, but usually within a second, and to ask again costs next to
nothing: a request is refused before it reaches the engine. Well-behaved clients double the time themselves."""


class RetryAfterMiddleware:
    """Adds the header to every response with status 503 that has none; vLLM and we answer so when a queue is full."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def adding(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == HTTPStatus.SERVICE_UNAVAILABLE:
                MutableHeaders(scope=message).setdefault("retry-after", str(SECONDS))
            await send(message)

        await self._app(scope, receive, adding)
