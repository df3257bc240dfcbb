# SPDX-License-Identifier: Apache-2.0
"""The end of requests that outlast the server."""

import asyncio
from http import HTTPStatus

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class CutOffMiddleware:
    """Ends requests that the HTTP server cancels, as it does when it stops: in words, or by closing once begun."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def noting(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, noting)
        except asyncio.CancelledError:
            if scope["type"] != "http":
                raise
            if not has_begun:
                await _STOPPING(scope, receive, send)


_STOPPING = JSONResponse(
    {
        "error": {
            "message": "The server is stopping.",
            "type": HTTPStatus.SERVICE_UNAVAILABLE.phrase,
            "param": None,
            "code": int(HTTPStatus.SERVICE_UNAVAILABLE),
        }
    },
    HTTPStatus.SERVICE_UNAVAILABLE,
)
