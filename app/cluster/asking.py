# SPDX-License-Identifier: Apache-2.0
"""Requests to replicas that may die meanwhile, or may answer for ever."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, Final

import httpx

MOST_BYTES: Final = "tessera.most_bytes"
"""Extension of a request whose answer is read as a whole: how long that may be."""


class BoundedTransport(httpx.AsyncHTTPTransport):
    """Ends an answer that is longer than :data:`MOST_BYTES` of its request, or compressed, which may hide its length.

    Other answers may have any length.
    """

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """The answer; reading it raises ``httpx.RemoteProtocolError`` at its bound."""
        if (most := request.extensions.get(MOST_BYTES)) is None:
            return await super().handle_async_request(request)
        request.headers["accept-encoding"] = "identity"
        response = await super().handle_async_request(request)
        bounded = _Bounded(response, 0 if "content-encoding" in response.headers else most)
        return httpx.Response(
            response.status_code, headers=response.headers, stream=bounded, extensions=response.extensions
        )


class _Bounded(httpx.AsyncByteStream):
    def __init__(self, response: httpx.Response, most_bytes: int) -> None:
        self._response = response
        self._left = most_bytes

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._response.aiter_raw():
            self._left -= len(part)
            if self._left < 0:
                raise httpx.RemoteProtocolError("an answer that is compressed, or too long")
            yield part

    async def aclose(self) -> None:
        await self._response.aclose()


async def answered_while(
    is_alive: Callable[[], Awaitable[bool]], request: Coroutine[Any, Any, httpx.Response], every_s: float
) -> httpx.Response | None:
    """The response, however long it takes; ``None`` once its replica is no longer alive.

    ``is_alive`` is asked every ``every_s`` seconds.
    """
    asking = asyncio.create_task(request)
    try:
        while not (await asyncio.wait({asking}, timeout=every_s))[0]:
            if not await is_alive():
                return None
        return asking.result()
    finally:
        asking.cancel()
