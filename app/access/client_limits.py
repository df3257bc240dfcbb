# SPDX-License-Identifier: Apache-2.0
"""Limits of a connection: size and complexity of the body, and time without progress."""

import asyncio
import logging
from http import HTTPStatus

from pydantic import ByteSize
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.http.json_size import MOST_BYTES, MOST_CONTAINERS, MOST_NAMES, MOST_VALUES, is_too_complex
from app.http.messages import QUICK_BYTES, has_files, read_parts, replay
from app.http.refusals import refusal

logger = logging.getLogger(__name__)

CLIENT_TIMEOUT_S = 60.0
"""Time without progress after which a client that neither sends nor reads is disconnected."""
BODY_TIMEOUT_S = 180.0
"""Time for a whole body: parts that come just in time must not hold the memory of the others for long."""


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
        is_json = not has_files(scope)
        most = ByteSize(min(self._max_body_size, MOST_BYTES)) if is_json else self._max_body_size
        try:
            declared = Headers(scope=scope).get("content-length", "")
            if declared.isdigit() and int(declared) > most:
                raise _TooLargeError
            async with asyncio.timeout(BODY_TIMEOUT_S):
                parts = await read_parts(_limited(receive, most))
        except _TooLargeError:
            why = "of JSON" if most < self._max_body_size else "--max-body-size"
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
            if await asyncio.to_thread(is_too_complex, parts[0]):
                words = f"the body has more than {MOST_CONTAINERS} arrays and objects, {MOST_NAMES} names"
                words += f" or {MOST_VALUES} values"
                return await refusal(HTTPStatus.BAD_REQUEST, "bad_request", words)(scope, receive, send)
        connection = _Connection(replay(parts, receive), send, CLIENT_TIMEOUT_S)
        await self._app(scope, connection.receive, connection.send)
        return None


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
