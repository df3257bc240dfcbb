# SPDX-License-Identifier: Apache-2.0
"""Middleware that extracts documents from requests to vLLM's endpoints before vLLM reads the body."""

import json
from functools import cache
from http import HTTPStatus
from typing import Any

from starlette.datastructures import MutableHeaders, State
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.collections.retrievers import RetrieverFailedError
from app.collections.store import UnknownCollectionError
from app.documents.cache_options import decide_of, options_of, parse_cache_field
from app.documents.document import BadRequestError
from app.documents.openai_documents import EXTRACTORS, Extraction
from app.documents.request_documents import cache_salt_of, dumped, keys_of
from app.http.messages import is_event_stream, path_of, read_body, replay
from app.http.refusals import refusal
from app.http.sse import ReportInserter
from app.prompt.marks import Marks
from app.settings import Settings
from cache.report import Retrieved
from engine_ext.wire.request import RequestContext


class DocumentsMiddleware:
    """Rewrites requests with documents, ``retrieve``, a ``cache`` field or the configured separator; passes others on.

    vLLM installs it through its ``--middleware`` option; marks and settings are in the app's state.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        extractor = EXTRACTORS.get(path_of(scope)) if scope["type"] == "http" and scope["method"] == "POST" else None
        if extractor is None:
            return await self._app(scope, receive, send)
        body = await read_body(receive)
        if body is None:
            return None
        settings: Settings = scope["app"].state.tessera_settings
        state: State = scope["app"].state
        try:
            parsed = _parsed(body, settings.chunk_separator)
            retrieved = None
            if parsed and parsed.get("retrieve") is not None:
                retrieved = await state.tessera_retrieval.fill_body(path_of(scope), parsed)
            extraction = extractor(parsed, settings.chunk_separator) if parsed else None
            if extraction is None:
                return await self._app(scope, replay(body, receive), send)
            ticket = _ticket(extraction, state, retrieved)
        except (BadRequestError, UnknownCollectionError, RetrieverFailedError) as error:
            return await _refused(error)(scope, receive, send)
        return await self._run(scope, receive, send, extraction, ticket)

    async def _run(
        self, scope: Scope, receive: Receive, send: Send, extraction: Extraction, ticket: RequestContext
    ) -> None:
        marks: Marks = scope["app"].state.tessera_marks
        with marks.issue(ticket, extraction.documents) as marked:
            extraction.insert(marked)
            try:
                body = dumped(extraction.body).encode()
            except BadRequestError as error:
                return await _refused(error)(scope, receive, send)
            MutableHeaders(scope=scope)["content-length"] = str(len(body))
            if extraction.body.get("stream"):
                send = _inserting(send, ReportInserter(ticket, "kv_transfer_params"))
            return await self._app(scope, replay(body, receive), send)


def _refused(error: BadRequestError | UnknownCollectionError | RetrieverFailedError) -> JSONResponse:
    if isinstance(error, RetrieverFailedError):
        return refusal(HTTPStatus.BAD_GATEWAY, "retriever_failed", str(error), parameter="retrieve")
    if isinstance(error, UnknownCollectionError):
        return refusal(HTTPStatus.NOT_FOUND, "not_found", str(error), parameter="retrieve.collection")
    return refusal(HTTPStatus.BAD_REQUEST, "bad_request", str(error), parameter=error.parameter)


def _parsed(body: bytes, separator: str | None) -> dict[str, Any] | None:
    """The body if it may have documents; ``None`` for others, and for malformed ones, which vLLM answers."""
    if not any(hint in body for hint in _hints(separator)):
        return None
    try:
        parsed = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return parsed if isinstance(parsed, dict) else None


@cache
def _hints(separator: str | None) -> tuple[bytes, ...]:
    """Byte strings of which a relevant body contains at least one; spares other requests the parsing."""
    fields = (b'"documents"', b'"document"', b'"cache"', b'"retrieve"')
    if separator is None:
        return fields
    # Verbatim or with escapes: the client chooses which characters to escape, and how.
    return (*fields, json.dumps(separator, ensure_ascii=False)[1:-1].encode(), b"\\u")


def _ticket(extraction: Extraction, state: State, retrieved: list[Retrieved] | None) -> RequestContext:
    for field in ("echo", "store", "use_beam_search"):
        if extraction.body.get(field):
            raise BadRequestError(f"{field} can't be combined with documents", field)
    cache = parse_cache_field(extraction.cache)
    options = options_of(cache, cache_salt_of(extraction.body), state)
    keys = keys_of(extraction.body, options, extraction.systems, extraction.documents)
    ids = tuple(document.id for document in extraction.documents)
    return RequestContext(options, ids, tuple(keys), decide=decide_of(cache, state), retrieved=retrieved)


def _inserting(send: Send, inserter: ReportInserter) -> Send:
    is_stream = False

    async def inserted(message: Message) -> None:
        nonlocal is_stream
        if message["type"] == "http.response.start":
            is_stream = is_event_stream(message)
        elif is_stream and message["type"] == "http.response.body":
            body = inserter.feed(message.get("body", b""))
            if not message.get("more_body"):
                body += inserter.end()
            message = {**message, "body": body}
        await send(message)

    return inserted
