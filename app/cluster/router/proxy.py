# SPDX-License-Identifier: Apache-2.0
"""Forwards requests to replicas and streams their responses back."""

import asyncio
import logging
import re
import socket
import time
from collections.abc import AsyncIterator
from http import HTTPStatus
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Final

import httpx
from starlette.responses import JSONResponse
from starlette.types import Message, Receive, Scope, Send

from app.cluster.asking import BoundedTransport
from app.cluster.router.chooser import Asked, Chooser
from app.cluster.router.directory import Directory
from app.cluster.router.forwarding import REPLICA_HEADER, Headers, forwarded, passed_on
from app.cluster.router.metrics import RouterMetrics
from app.cluster.router.prefill import Prefill
from app.http.messages import has_files, in_thread_if_long, read_body
from app.http.refusals import refusal
from machine.http_client import CONNECTIONS
from replicas.registry import Replica

logger = logging.getLogger(__name__)

MOST_ATTEMPTS = 3
_CONNECT_S = 2.0
_OF_EACH_SERVER = (b"date", b"server")
"""Headers that the router's own HTTP server sets."""
# A host that has vanished closes no connection: let the kernel notice after about ten seconds.
_KEEP_ALIVE = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
]


_STATUSES: Final = range(200, 600)
_CONTROL: Final = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")


class _UnreachableError(Exception):
    """The replica did not answer; another one may be tried."""


def http_client() -> httpx.AsyncClient:
    """An HTTP client without cookies, which are its clients', or time limits (:meth:`Directory.while_there`)."""
    transport = BoundedTransport(limits=CONNECTIONS, socket_options=_KEEP_ALIVE)
    timeout, cookies = httpx.Timeout(None, connect=_CONNECT_S), CookieJar(DefaultCookiePolicy(netscape=False))
    return httpx.AsyncClient(transport=transport, timeout=timeout, cookies=cookies, trust_env=False)


class Proxy:
    """The ASGI application behind all paths except the router's own."""

    def __init__(
        self,
        chooser: Chooser,
        prefill: Prefill,
        directory: Directory,
        client: httpx.AsyncClient,
        metrics: RouterMetrics,
    ) -> None:
        self._chooser = chooser
        self._prefill = prefill
        self._directory = directory
        self._client = client
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await read_body(receive)
        if body is None:
            return
        answering = asyncio.create_task(self._answer(scope, body, send))
        leaving = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            # A disconnected client's request ends at the replica too: its connection is closed.
            for task in (leaving, answering):
                if not task.done():
                    task.cancel()
            await asyncio.wait({answering, leaving})
        if not answering.cancelled():
            answering.result()

    async def _answer(self, scope: Scope, body: bytes, send: Send) -> None:
        name = next((value.decode("latin-1") for key, value in scope["headers"] if key == REPLICA_HEADER), None)
        path, asked = scope["path"], Asked(time.perf_counter())
        if not has_files(scope):
            asked = await in_thread_if_long(len(body), self._chooser.read, asked.since, path, body)
        replicas = (await self._chooser.choose(path, asked, name))[:MOST_ATTEMPTS]
        body, headers = await self._prefill.prepared(scope, body, asked, replicas)
        for attempt, replica in enumerate(replicas, 1):
            load = self._metrics.load.labels(replica.name)
            with self._chooser.in_flight.one(replica.url), load.track_inprogress():
                try:
                    is_last = attempt == len(replicas)
                    has_answered = await self._attempt(replica, scope, body, headers, send, is_last=is_last)
                except _UnreachableError as error:
                    logger.warning("replica %s: %s", replica.name, error)
                    self._directory.suspect(replica)
                    self._metrics.retries.labels("unreachable").inc()
                    continue
                if has_answered:
                    return
                self._metrics.retries.labels("busy").inc()
        message = f"no replica named {name!r}" if name is not None else "no replica can be reached"
        await unavailable(message)(scope, _nothing, send)

    async def _attempt(
        self, replica: Replica, scope: Scope, body: bytes, headers: Headers, send: Send, *, is_last: bool
    ) -> bool:
        """Streams the response of ``replica``; ``False`` if it is 503 instead, and not the last attempt."""
        response, first, others = await self._send(replica, forwarded(scope, replica, body, headers))
        try:
            if response.status_code == HTTPStatus.SERVICE_UNAVAILABLE and not is_last:
                return False
            headers_of_replica = (pair for pair in passed_on(response.headers.raw) if pair[0] not in _OF_EACH_SERVER)
            named = [*headers_of_replica, (REPLICA_HEADER, replica.name.encode())]
            status = str(response.status_code)
            try:
                async with self._directory.while_there(replica):
                    await send({"type": "http.response.start", "status": response.status_code, "headers": named})
                    await send({"type": "http.response.body", "body": first, "more_body": True})
                    async for data in others:
                        await send({"type": "http.response.body", "body": data, "more_body": True})
            except (httpx.HTTPError, TimeoutError) as error:
                status = "broken"
                self._directory.suspect(replica)
                # Don't end the response: the client must notice that it is incomplete.
                raise ConnectionResetError(f"replica {replica.name} broke off: {error!r}") from error
            finally:
                self._metrics.requests.labels(replica.name, status).inc()
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return True
        finally:
            await response.aclose()

    async def _send(
        self, replica: Replica, request: httpx.Request
    ) -> tuple[httpx.Response, bytes, AsyncIterator[bytes]]:
        """The response of ``replica``, the first bytes of its content, and those that follow.

        Until these first bytes another replica may answer: often one ends between a response's head and its content.
        """
        if replica not in self._directory:  # while another was waited for
            raise _UnreachableError("it has been forgotten")
        try:
            async with self._directory.while_there(replica):
                response = await self._client.send(request, stream=True)
                content = response.aiter_raw()
                first = await anext(content, b"")
        except (httpx.HTTPError, TimeoutError) as error:
            raise _UnreachableError(f"{type(error).__name__}: {error}") from error
        if response.status_code in _STATUSES and not any(_CONTROL.search(value) for _, value in response.headers.raw):
            return response, first, content
        await response.aclose()
        raise _UnreachableError("its answer isn't HTTP, and can't be sent on")


def unavailable(message: str) -> JSONResponse:
    """The refusal of a request that no replica can take."""
    return refusal(HTTPStatus.SERVICE_UNAVAILABLE, "no_replica", message, headers={"retry-after": "1"})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _nothing() -> Message:
    return {"type": "http.disconnect"}
