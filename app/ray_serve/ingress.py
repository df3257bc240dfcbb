# SPDX-License-Identifier: Apache-2.0
"""The deployment behind Serve's HTTP proxies: forwards requests to the engine's replicas."""

import asyncio
import logging
from contextlib import suppress
from http import HTTPStatus

from ray import serve
from ray.exceptions import ObjectLostError, RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocketClose

from app.cluster.router.broadcast import concerns_all, merged
from app.cluster.router.proxy import MOST_ATTEMPTS, unavailable
from app.documents.request_documents import Reading
from app.http.messages import read_body
from app.ray_serve.answer import Answer
from app.ray_serve.exchange import RequestHead, head_of, wished_replica
from app.ray_serve.lookup import Lookup
from app.ray_serve.options import Options
from app.ray_serve.request_router import Hint
from replicas.redis_registry import RedisRegistry

logger = logging.getLogger(__name__)

_LOST = (RayActorError, ObjectLostError)  # a replica is gone, or its machine
_REFUSED = (BackPressureError, DeploymentUnavailableError)  # Ray itself refuses


class Ingress:
    """Looks up the holders of a request's documents, and has Ray call the best replica."""

    def __init__(self, engine: DeploymentHandle, options: Options) -> None:
        self._refreshing: asyncio.Task[None] | None = None
        self._engine = engine
        self._handle = engine.options(stream=True).handle
        self._registry = _registry(options)
        reading = Reading.of(options.chunk_separator, options.chunk_scope, options.documents)
        self._lookup = Lookup(self._registry, reading)
        self._refreshing = asyncio.create_task(self._lookup.run(), name="lookup")

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers an HTTP request. Serve cancels this call when the client disconnects."""
        body = await read_body(receive)
        if body is None:
            return
        head = head_of(scope)
        try:
            answer = await (self._of_all(head, body) if concerns_all({**head}) else self._of_one(head, body))
        except _REFUSED as error:
            answer = unavailable(error.message)
        await answer(scope, receive, send)

    async def _of_one(self, head: RequestHead, body: bytes) -> ASGIApp:
        """The best replica's response, or another one's if that replica fails or refuses."""
        documents = await self._lookup.documents(head["path"], body)
        wished, avoided = wished_replica(head["headers"]), set[str]()
        answer: Answer | None = None
        for _ in range(MOST_ATTEMPTS):
            batches = self._handle.remote(head, body, hint=Hint(documents, wished, frozenset(avoided)))
            try:
                answer = await Answer.begun(batches)
            except _LOST as error:
                logger.warning("a replica was lost: %s", error)
                continue
            if answer.status != HTTPStatus.SERVICE_UNAVAILABLE or answer.replica in avoided or wished is not None:
                break
            avoided.add(answer.replica)
        return answer or unavailable("no replica can be reached")

    async def _of_all(self, head: RequestHead, body: bytes) -> ASGIApp:
        """One response merged from all replicas; lost replicas hold nothing and are skipped."""
        answers = await self._engine.broadcast("ask", head, body).results_async(return_exceptions=True)
        by_name = {}
        for answer in answers:
            if isinstance(answer, _LOST):
                continue
            if isinstance(answer, BaseException):
                raise answer
            name, status, said = answer
            by_name[name] = (status, said)
        return merged(by_name) if by_name else unavailable("no replica can be reached")

    async def __del__(self) -> None:
        """Ends the look-ups. Serve awaits this when it stops a replica."""
        if self._refreshing is not None:
            self._refreshing.cancel()
            with suppress(asyncio.CancelledError):
                await self._refreshing
        if self._registry is not None:
            await self._registry.close()


def ingress_app() -> Starlette:
    """The application of an :class:`Ingress` for ``serve.ingress``, made in the replica.

    Serve would pickle an application made earlier, together with this module's objects.
    """

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            return await WebSocketClose()(scope, receive, send)
        ingress: Ingress = serve.get_replica_context().servable_object
        return await ingress.answer(scope, receive, send)

    return Starlette(routes=[Mount("/", answer)])


def _registry(options: Options) -> RedisRegistry | None:
    return None if options.registry is None else RedisRegistry(options.registry)
