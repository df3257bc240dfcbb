# SPDX-License-Identifier: Apache-2.0
"""Requests for the chunk caches of all replicas: clear, pin, and delete."""

import asyncio
from http import HTTPStatus
from typing import Any

import httpx
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from app.cluster.asking import MOST_BYTES
from app.cluster.router.directory import Directory
from app.cluster.router.forwarding import REPLICA_HEADER, forwarded
from app.cluster.router.proxy import Proxy, unavailable
from app.http.messages import QUICK_BYTES, read_body
from app.http.refusals import refusal
from replicas.registry import Replica

_TIMEOUT_S = 30.0


class Broadcast:
    """Sends requests that clear, drop or pin to every replica; the others to ``proxy``."""

    def __init__(self, directory: Directory, client: httpx.AsyncClient, proxy: Proxy) -> None:
        self._directory = directory
        self._client = client
        self._proxy = proxy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            words = "the router passes no WebSockets on: connect to one of the replicas (GET /v1/cluster)"
            return await refusal(HTTPStatus.BAD_REQUEST, "not_implemented", words)(scope, receive, send)
        if not concerns_all(scope):
            return await self._proxy(scope, receive, send)
        body = await read_body(receive)
        if body is None:
            return None
        replicas = self._directory.replicas
        if not replicas:
            return await unavailable("no replica can be reached")(scope, receive, send)
        answers = await asyncio.gather(*(self._ask(replica, scope, body) for replica in replicas))
        by_name = {replica.name: answer for replica, answer in zip(replicas, answers, strict=True)}
        return await merged(by_name)(scope, receive, send)

    async def _ask(self, replica: Replica, scope: Scope, body: bytes) -> tuple[int, dict[str, Any]]:
        request = forwarded(scope, replica, body)
        request.extensions[MOST_BYTES] = QUICK_BYTES
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                response = await self._client.send(request)
            return response.status_code, checked(response.json())
        except (httpx.HTTPError, TimeoutError, ValueError, RecursionError) as error:
            self._directory.suspect(replica)
            return HTTPStatus.BAD_GATEWAY, {"error": {"message": f"{type(error).__name__}: {error}"}}


def concerns_all(scope: Scope) -> bool:
    """Whether a request is for every replica: clears, deletes or pins, naming no replica."""
    if any(name == REPLICA_HEADER for name, _ in scope["headers"]):
        return False
    method, path = scope.get("method"), scope["path"]  # a WebSocket has none
    return (method, path) == ("POST", "/v1/cache/clear") or (
        method in ("DELETE", "PATCH") and path.startswith("/v1/rag/chunks/")
    )


def checked(answer: Any) -> dict[str, Any]:
    """Return a replica's answer; raise ``ValueError`` or ``RecursionError`` for what can't be merged or passed on."""
    if not isinstance(answer, dict) or type(answer.get("cleared", 0)) is not int:
        raise ValueError("not an answer of a replica")
    JSONResponse(answer)  # writes no NaN, and no half of a character
    return answer


def merged(answers: dict[str, tuple[int, dict[str, Any]]]) -> JSONResponse:
    """Merges the replicas' answers; a replica that lacks the chunk is no failure."""
    statuses = {status for status, _ in answers.values()}
    relevant = (statuses - {HTTPStatus.NOT_FOUND}) or statuses
    summary = next(answer for status, answer in answers.values() if status == max(relevant))
    if "cleared" in summary:
        summary = {"cleared": sum(answer.get("cleared", 0) for _, answer in answers.values())}
    said = {name: {"status": int(status), "answer": answer} for name, (status, answer) in answers.items()}
    return JSONResponse({**summary, "replicas": said}, max(relevant))
