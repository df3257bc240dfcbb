# SPDX-License-Identifier: Apache-2.0
"""Runs an ASGI application for a request from another process."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import TypedDict

from starlette.types import ASGIApp, Message, Scope

from app.cluster.router.forwarding import REPLICA_HEADER

logger = logging.getLogger(__name__)

GATHER_S = 0.02
"""Seconds to gather messages after the first: each list costs Ray about a millisecond, however short it is."""
ABORT_S = 5.0
"""Seconds for an application to notice that its client has disconnected."""
Headers = list[tuple[bytes, bytes]]
_ASGI = {
    "version": "3.0",
    "spec_version": "2.3",
}  # 2.3: applications learn of a disconnect by receiving, as under uvicorn


class RequestHead(TypedDict):
    """The parts of an ASGI scope that applications read, as values that can be pickled."""

    method: str
    scheme: str
    http_version: str
    path: str
    raw_path: bytes
    query_string: bytes
    headers: Headers
    client: tuple[str, int] | None
    server: tuple[str, int | None] | None


def head_of(scope: Scope) -> RequestHead:
    """The head of a request, its path without the application's prefix in Serve."""
    prefix = scope.get("root_path", "")
    return RequestHead(
        method=scope["method"],
        scheme=scope["scheme"],
        http_version=scope["http_version"],
        path=scope["path"].removeprefix(prefix) or "/",
        raw_path=(scope.get("raw_path") or scope["path"].encode()).removeprefix(prefix.encode()) or b"/",
        query_string=scope["query_string"],
        headers=[(bytes(name), bytes(value)) for name, value in scope["headers"]],
        client=tuple(scope["client"]) if scope.get("client") else None,
        server=tuple(scope["server"]) if scope.get("server") else None,
    )


def wished_replica(headers: Headers) -> str | None:
    """The name of the replica that the client asks for, if any."""
    return next((value.decode("latin-1") for name, value in headers if name == REPLICA_HEADER), None)


async def answered(app: ASGIApp, head: RequestHead, body: bytes) -> AsyncGenerator[list[Message], None]:
    """Yields the messages of ``app``'s response in lists. Closing the generator is a disconnect of the client."""
    exchange = _Exchange(body)
    scope = {"type": "http", "asgi": _ASGI, "root_path": "", "state": {}, "extensions": {}, **head}
    running = asyncio.create_task(_run(app, scope, exchange))
    try:
        async with aclosing(exchange.messages()) as batches:
            async for batch in batches:
                yield batch
        await running
    finally:
        exchange.left.set()
        if not running.done():
            await asyncio.wait([running], timeout=ABORT_S)
            running.cancel()


async def _run(app: ASGIApp, scope: Scope, exchange: "_Exchange") -> None:
    try:
        await app(scope, exchange.receive, exchange.send)
    except Exception:
        if not exchange.is_complete:
            raise
        logger.exception("error after the answer")  # Starlette answers 500 and raises the cause
    finally:
        exchange.end()


class _Exchange:
    """Messages that an application receives and sends."""

    def __init__(self, body: bytes) -> None:
        self.left = asyncio.Event()
        """Set when the client has disconnected."""
        self.is_complete = False
        self._ended = asyncio.Event()
        self._body: bytes | None = body
        self._sent: asyncio.Queue[Message | None] = asyncio.Queue()

    async def receive(self) -> Message:
        if (body := self._body) is not None:
            self._body = None
            return {"type": "http.request", "body": body, "more_body": False}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if not self.left.is_set():
            self._sent.put_nowait(message)
        self.is_complete = message["type"] == "http.response.body" and not message.get("more_body", False)

    def end(self) -> None:
        self._sent.put_nowait(None)
        self._ended.set()

    async def messages(self) -> AsyncGenerator[list[Message], None]:
        """Yields messages in lists until the end, the first list at once."""
        has_ended = False
        while not has_ended:
            batch = [await self._sent.get()]
            while not self._sent.empty():
                batch.append(self._sent.get_nowait())
            has_ended = batch[-1] is None
            if messages := [message for message in batch if message is not None]:
                yield messages
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), GATHER_S)
