# SPDX-License-Identifier: Apache-2.0
"""Ends requests that outlive the server or its engine, and streams that fail."""

import asyncio
import logging
from http import HTTPStatus

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from vllm.exceptions import VLLMValidationError

from app.http.messages import is_event_stream
from app.http.refusals import REASONS, refusal
from engine_ext.client.engine import ChunkEngine
from engine_ext.wire.vllm_compat import GracefulHTTPError

logger = logging.getLogger(__name__)


class CutOffMiddleware:
    """Ends requests that can no longer be served: by refusal, or by closing the response.

    These are requests after the signal to stop or after the engine's death, requests that fail because of either, and
    requests that the HTTP server cancels. A stopping server waits for all others, which are counted. An event stream
    that fails for another reason, or is refused when it has begun, ends with an error event: ``/v1/responses`` asks the
    engine only then.
    """

    def __init__(self, app: ASGIApp, engine: ChunkEngine) -> None:
        self._app = app
        self._engine = engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        if scope["method"] != "POST":
            return await self._run(scope, receive, send)
        if answer := self._ending():
            return await answer(scope, receive, send)
        with self._engine.answering():
            return await self._run(scope, receive, send)

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = is_replaced = is_open_stream = False

        async def noting(message: Message) -> None:
            nonlocal has_begun, is_replaced, is_open_stream
            is_failure = not has_begun and message["status"] >= HTTPStatus.INTERNAL_SERVER_ERROR
            if message["type"] == "http.response.start":
                is_open_stream = is_event_stream(message)
            elif not message.get("more_body"):
                is_open_stream = False
            if is_failure and (answer := self._ending()):
                is_replaced = True
                await answer(scope, receive, send)
            has_begun = True
            if not is_replaced:
                await send(message)

        try:
            await self._app(scope, receive, noting)
        except (asyncio.CancelledError, Exception) as error:
            answer = self._ending()
            is_its_own = isinstance(error, Exception) and answer is None
            if is_its_own and not is_open_stream:
                raise
            if is_its_own:
                if (refused := _refused(error)) is None:
                    logger.exception("an event stream failed mid-response")
                await send({"type": "http.response.body", "body": _event(refused or _FAILED)})
            elif not has_begun:
                await (answer or _STOPPING)(scope, receive, send)

    def _ending(self) -> JSONResponse | None:
        """The refusal of every request, if the server is stopping or its engine has died."""
        if self._engine.is_stopping:
            return _STOPPING
        return _DIED if self._engine.has_died else None


def _refused(error: BaseException) -> JSONResponse | None:
    """The refusal of a request, if an error is one; ``None`` if the server has failed."""
    error = error.__cause__ or error  # Starlette's own comes from one that it could have answered before the stream
    if isinstance(error, GracefulHTTPError):
        status = HTTPStatus(error.http_status)
        return refusal(status, REASONS.get(status, "refused"), str(error))
    if isinstance(error, VLLMValidationError):
        return refusal(HTTPStatus.BAD_REQUEST, "bad_request", str(error), parameter=error.parameter)
    return None


def _event(answer: JSONResponse) -> bytes:
    return b'event: error\ndata: {"type": "error", ' + bytes(answer.body)[1:] + b"\n\n"


_FAILED = refusal(HTTPStatus.INTERNAL_SERVER_ERROR, "internal_error", "The answer failed; the server's log says why.")
_STOPPING = refusal(HTTPStatus.SERVICE_UNAVAILABLE, "stopping", "The server is stopping.")
_DIED = refusal(HTTPStatus.SERVICE_UNAVAILABLE, "engine_died", "The engine has died; the server ends.")
