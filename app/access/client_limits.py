# SPDX-License-Identifier: Apache-2.0
"""Limits of a connection: sizes of head and body, complexity of the body, and time without progress."""

import asyncio
import ipaddress
import logging
import re
from collections import deque
from http import HTTPStatus
from typing import Final
from weakref import WeakSet

from pydantic import ByteSize
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from app.http.json_size import (
    MOST_BYTES,
    MOST_CONTAINERS,
    MOST_DIGITS,
    MOST_ESCAPES,
    MOST_NAMES,
    MOST_VALUES,
    is_too_complex,
)
from app.http.messages import QUICK_BYTES, cut, has_files, read_parts, replay
from app.http.refusals import refusal
from engine_ext.client.threads import in_thread

logger = logging.getLogger(__name__)

CLIENT_TIMEOUT_S = 60.0
"""Time without progress after which a client that neither sends nor reads is disconnected."""
BODY_TIMEOUT_S = 180.0
"""Time for a whole body: parts that come just in time must not hold the memory of the others for long."""
MOST_HEAD_BYTES: Final = 1 << 16
"""Of a request line and headers, or between two parts of a body."""
MOST_HEADERS: Final = 256
MOST_WAITING: Final = 16
"""Requests that a connection has sent before the answer to an earlier one."""

_CLIENT: Final = re.compile(rb"(?:([0-9.]+)|\[([0-9A-Fa-f:.]+)\])(?::[0-9]{1,5})?|([0-9A-Fa-f:.]+)")
_SIZES = {"": MOST_BYTES, "application/x-www-form-urlencoded": QUICK_BYTES}
"""Most bytes of a body without files, by the beginning of its type."""


class BoundedProtocol(HttpToolsProtocol):
    """HTTP/1.1 as uvicorn speaks it, with limits for what comes before anybody could check a key; beyond them, 400.

    An ``X-Forwarded-For`` of other things than IP addresses is left out.

    Uvicorn itself keeps a head of any length, and all requests that come in one piece. Bytes are counted since the last
    one that ended a request or belonged to a body: a body's chunks have heads of their own, and headers may follow it.
    Where a connection ends, it tells the last request of that; here, also those before it, which would go on to answer.
    """

    _num_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection."""
        super().connection_made(transport)
        self._requests = WeakSet[RequestResponseCycle]()

    def connection_lost(self, exc: Exception | None) -> None:
        """Take its end."""
        self._leave()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Refuse what comes, and end the connection."""
        self._leave()
        super().send_400_response(msg)

    def _leave(self) -> None:
        self.pipeline.clear()
        for request in self._requests:
            request.disconnected = True
            request.message_event.set()

    def data_received(self, data: bytes) -> None:
        """Take bytes from the connection."""
        self._num_bytes += len(data)
        super().data_received(data)
        if self._num_bytes > MOST_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"the request's head is longer than {MOST_HEAD_BYTES} bytes")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header."""
        if len(self.headers) >= MOST_HEADERS:
            raise ValueError(f"more than {MOST_HEADERS} headers")
        if name.lower() == b"x-forwarded-for" and not all(map(_is_client, value.split(b","))):
            return  # uvicorn would take anything for the client's address, and log it
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Begin the request, or have it wait."""
        if len(self.pipeline) >= MOST_WAITING:
            raise ValueError(f"more than {MOST_WAITING} requests wait")
        super().on_headers_complete()
        if self.cycle is not None:  # else it has left HTTP
            self._requests.add(self.cycle)

    def on_body(self, body: bytes) -> None:
        """Take a part of the body."""
        self._num_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Take the end of a request."""
        self._num_bytes = 0
        super().on_message_complete()


class _TooLargeError(Exception):
    pass


class ClientLimitsMiddleware:
    """Refuses large (413), slow (408) and complex (400) bodies, and ends responses that nobody reads."""

    def __init__(self, app: ASGIApp, max_body_size: ByteSize) -> None:
        self._app = app
        self._max_body_size = max_body_size

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers, is_json = Headers(scope=scope), not has_files(scope)
        most, why = self._max_body_size, "--max-body-size"
        for kind, size in _SIZES.items():
            if is_json and size < most and headers.get("content-type", "").lower().startswith(kind):
                most, why = ByteSize(size), f"of {kind or 'JSON'}"
        try:
            declared = headers.get("content-length", "")
            if declared.isdigit() and int(declared) > most:
                raise _TooLargeError
            async with asyncio.timeout(BODY_TIMEOUT_S):
                parts = await read_parts(_limited(receive, most))
        except _TooLargeError:
            words = f"the body is larger than {most.human_readable()} ({why})"
            answer = refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "body_too_large", words, headers=_CLOSE)
            return await answer(scope, receive, send)
        except TimeoutError:
            words = f"nothing of the body came for {CLIENT_TIMEOUT_S:g} s, or not all of it in {BODY_TIMEOUT_S:g} s"
            answer = refusal(HTTPStatus.REQUEST_TIMEOUT, "client_too_slow", words, headers=_CLOSE)
            return await answer(scope, receive, send)
        if parts is None:
            return None
        if is_json and sum(map(len, parts)) > QUICK_BYTES:  # less is never too complex
            parts = [b"".join(parts)]
            if await in_thread(is_too_complex, parts[0]):
                words = (
                    f"the body has more than {MOST_CONTAINERS} arrays and objects, {MOST_NAMES} names, {MOST_VALUES} "
                )
                words += f"values or {MOST_ESCAPES} escapes, or a number of more than {MOST_DIGITS} digits"
                return await refusal(HTTPStatus.BAD_REQUEST, "bad_request", words)(scope, receive, send)
        coming: deque[bytes | memoryview] = deque(parts if is_json else cut(parts))
        del parts
        connection = _Connection(replay(coming, receive), send, CLIENT_TIMEOUT_S)
        try:
            await self._app(scope, connection.receive, connection.send)
        finally:
            while coming:  # to free a large file at once would take long
                coming.popleft()
                await asyncio.sleep(0)


class _Connection:
    """Reports a client that reads nothing for ``patience_s`` seconds to the application as disconnected.

    With cancellation instead, a generator of the answer would only end when it is garbage-collected.
    """

    def __init__(self, receive: Receive, send: Send, patience_s: float) -> None:
        self._receive = receive
        self._send = send
        self._patience_s = patience_s
        self._is_cut_off = asyncio.Event()

    async def receive(self) -> Message:
        received = asyncio.ensure_future(self._receive())
        cut_off = asyncio.ensure_future(self._is_cut_off.wait())
        try:
            await asyncio.wait({received, cut_off}, return_when=asyncio.FIRST_COMPLETED)
            return received.result() if received.done() else {"type": "http.disconnect"}
        finally:
            received.cancel()
            cut_off.cancel()

    async def send(self, message: Message) -> None:
        if self._is_cut_off.is_set():
            return  # at once, as for a disconnected client: the application ends where it receives next
        try:
            async with asyncio.timeout(self._patience_s):
                await self._send(message)
        except TimeoutError:
            logger.warning("disconnected a client that read nothing for %g s", self._patience_s)
            self._is_cut_off.set()


_CLOSE = {"connection": "close"}


def _is_client(forwarded: bytes) -> bool:
    """Whether a proxy says an IP address, perhaps with a port."""
    found = _CLIENT.fullmatch(forwarded.strip())
    try:
        return found is not None and bool(ipaddress.ip_address((found[1] or found[2] or found[3]).decode()))
    except ValueError:
        return False


def _limited(receive: Receive, max_bytes: int) -> Receive:
    num_bytes = 0

    async def limited() -> Message:
        nonlocal num_bytes
        async with asyncio.timeout(CLIENT_TIMEOUT_S):
            message = await receive()
        num_bytes += len(message.get("body", b""))
        if num_bytes > max_bytes:
            raise _TooLargeError
        return message

    return limited
