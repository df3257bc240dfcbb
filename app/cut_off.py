# SPDX-License-Identifier: Apache-2.0
"""The end of requests that outlast the server."""

import asyncio
from http import HTTPStatus

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.refusals import refusal


class CutOffMiddleware:
    """Ends requests that a stopping server can't serve any more: in words, or by closing once begun.

    Those are requests that come after the signal (what is needed to render prompts has then ended), requests that
    fail for that reason, and those that the HTTP server cancels.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        if scope["method"] == "POST" and _is_stopping(scope):
            return await _STOPPING(scope, receive, send)
        has_begun = is_replaced = False

        async def noting(message: Message) -> None:
            nonlocal has_begun, is_replaced
            if not has_begun and message["status"] >= HTTPStatus.INTERNAL_SERVER_ERROR and _is_stopping(scope):
                is_replaced = True
                await _STOPPING(scope, receive, send)
            has_begun = True
            if not is_replaced:
                await send(message)

        try:
            await self._app(scope, receive, noting)
        except (asyncio.CancelledError, Exception) as error:
            if isinstance(error, Exception) and not _is_stopping(scope):
                raise
            if not has_begun:
                await _STOPPING(scope, receive, send)


def _is_stopping(scope: Scope) -> bool:
    return bool(scope["app"].state.engine_client.is_stopping)


_STOPPING = refusal(HTTPStatus.SERVICE_UNAVAILABLE, "stopping", "The server is stopping.")
