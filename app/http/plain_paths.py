# SPDX-License-Identifier: Apache-2.0
"""What clients may rely on with any HTTP server: ``HEAD`` where there is ``GET``, and paths with a slash at the end."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.http.messages import path_of


class PlainPathsMiddleware:
    """Answers ``HEAD`` as ``GET`` without the body, and a path with a slash at the end as the one without.

    It stands outside everything that looks at a path. A redirection would lead to the address of a replica, and many
    clients don't follow one with a body.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            return await self._app(scope, receive, send)
        path, raw = path_of(scope), scope.get("raw_path")
        # Two slashes are refused, not taken for one.
        if path.endswith("/") and path != "/" and not path.endswith("//"):
            scope = {**scope, "path": scope["path"][:-1], "raw_path": raw.removesuffix(b"/") if raw else raw}
        if scope.get("method") == "HEAD":
            return await self._app({**scope, "method": "GET"}, receive, _without_body(send))
        return await self._app(scope, receive, send)


def _without_body(send: Send) -> Send:
    async def bare(message: Message) -> None:
        await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

    return bare
