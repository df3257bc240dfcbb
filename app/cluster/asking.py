# SPDX-License-Identifier: Apache-2.0
"""Requests to replicas that may answer for ever."""

import ssl
from collections.abc import AsyncIterator
from typing import Any, Final

import httpcore
import httpx

MOST_BYTES: Final = "tessera.most_bytes"
"""Extension of a request whose answer is read as a whole: how long that may be."""
MOST_HEAD_BYTES: Final = 1 << 17
"""Of an answer's head, and of the interim ones (status 1xx) before it, of which HTTP allows any number."""


class BoundedTransport(httpx.AsyncHTTPTransport):
    """Ends an answer whose head is too long, and one that is longer than :data:`MOST_BYTES` of its request.

    The latter also if it is compressed, which may hide its length. Other answers may have any length.
    """

    def __init__(self, limits: httpx.Limits, **options: Any) -> None:
        super().__init__(limits=limits, **options)
        self._pool._network_backend = _Network()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """The answer; this, and reading it, raises ``httpx.RemoteProtocolError`` at a bound."""
        most = request.extensions.get(MOST_BYTES)
        if most is not None:
            request.headers["accept-encoding"] = "identity"
        response = await super().handle_async_request(request)
        connection = response.extensions["network_stream"]
        if isinstance(connection, _BoundedHead):  # else it has left HTTP
            connection.head_ends()
        if most is None:
            return response
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


class _Network(httpcore.AnyIOBackend):
    """The network as ``httpcore`` knows it by default, with bounded heads."""

    async def connect_tcp(self, *args: Any, **options: Any) -> httpcore.AsyncNetworkStream:
        return _BoundedHead(await super().connect_tcp(*args, **options))


class _BoundedHead(httpcore.AsyncNetworkStream):
    """A connection from which only so much is read between a request and the end of its answer's head."""

    def __init__(self, stream: httpcore.AsyncNetworkStream) -> None:
        self._stream = stream
        self._left: int | None = MOST_HEAD_BYTES

    def head_ends(self) -> None:
        """Read whatever comes, until the next request."""
        self._left = None

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        part = await self._stream.read(max_bytes, timeout)
        if self._left is not None:
            self._left -= len(part)
            if self._left < 0:
                raise httpcore.RemoteProtocolError("an answer whose head does not end")
        return part

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._left = MOST_HEAD_BYTES
        await self._stream.write(buffer, timeout)

    async def aclose(self) -> None:
        await self._stream.aclose()

    async def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.AsyncNetworkStream:
        return _BoundedHead(await self._stream.start_tls(ssl_context, server_hostname, timeout))

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)
