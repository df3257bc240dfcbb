# SPDX-License-Identifier: Apache-2.0
"""Our endpoints on the OpenAPI page: schemas of their answers, and possible refusals."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Mapping
from http import HTTPStatus
from typing import Any, Final

from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from starlette.responses import Content
from starlette.types import Send

from app.http.refusals import Reason
from cache.report import Shape

OUR_TAGS = frozenset({"RAG", "Collections", "Chunks", "Chunk cache", "Cluster"})
EVENT_STREAM: Mapping[str, Any] = {"text/event-stream": {"schema": {"type": "string"}}}


class JsonLines(StreamingResponse):
    """One JSON object per line.

    It begins with the first one, so that a request still has an answer if it ends before, as when the server stops.
    """

    media_type = "application/x-ndjson"

    async def stream_response(self, send: Send) -> None:
        """Send the lines."""
        lines = aiter(self.body_iterator)
        first = await anext(lines)
        self.body_iterator = _after(first, lines)
        await super().stream_response(send)


async def _after(first: Content, others: AsyncIterator[Content]) -> AsyncIterator[Content]:
    yield first
    async for part in others:
        yield part


_PART: Final = 1 << 13
"""Characters that are written at once: a write for each item would keep other threads from running."""


class JsonList(StreamingResponse):
    """A JSON object with a list at its end, written part by part: as a whole, a long one would hold the event loop."""

    media_type = "application/json"

    def __init__(self, fields: Mapping[str, Any], name: str, items: Iterable[Mapping[str, Any]]) -> None:
        super().__init__(_items(json.dumps({**fields, name: []}).removesuffix("]}"), items))


async def _items(head: str, items: Iterable[Mapping[str, Any]]) -> AsyncIterator[str]:
    part, separator = head, ""
    for item in items:
        part += separator + json.dumps(item)
        separator = ", "
        if len(part) > _PART:
            yield part
            part = ""
            await asyncio.sleep(0)
    yield part + "]}"


class RefusalDetail(Shape):
    """OpenAI's error object. ``message`` is for people, ``reason`` for programs; ``param`` is the field at fault."""

    message: str
    type: str
    param: str | None
    code: int
    reason: Reason


class Refusal(Shape):
    """A request that was not served."""

    error: RefusalDetail


_DESCRIPTIONS = {
    HTTPStatus.BAD_REQUEST: "The request can't be served as sent; `error.param` names the field at fault.",
    HTTPStatus.UNAUTHORIZED: "The API key is missing or unknown.",
    HTTPStatus.FORBIDDEN: "The key's tenant lacks the role for this, or only replicas may send it.",
    HTTPStatus.NOT_FOUND: "No such model, chunk, collection or registry.",
    HTTPStatus.REQUEST_TIMEOUT: "The body arrived too slowly.",
    HTTPStatus.CONFLICT: "The state of the cache does not allow it; `error.message` says why.",
    HTTPStatus.GONE: "The chunk of an id is no longer cached: send its text again.",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "The body, or the file, is too large.",
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE: "This kind of file can't be split, or the body is of another kind than JSON.",
    HTTPStatus.TOO_MANY_REQUESTS: "The tenant has reached a limit; `Retry-After` says when to retry.",
    HTTPStatus.BAD_GATEWAY: "The server's retriever failed; `error.message` says why.",
    HTTPStatus.SERVICE_UNAVAILABLE: "The queue is full, or the server is stopping; `Retry-After` says when to retry.",
    HTTPStatus.INSUFFICIENT_STORAGE: "The collection's folder can't be written to; what it had is unchanged.",
}
_EVERYWHERE = (
    HTTPStatus.BAD_REQUEST,
    HTTPStatus.UNAUTHORIZED,
    HTTPStatus.FORBIDDEN,
    HTTPStatus.REQUEST_TIMEOUT,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    HTTPStatus.TOO_MANY_REQUESTS,
)
_COMPONENTS = "#/components/schemas/"
_REFUSAL = {"application/json": {"schema": {"$ref": f"{_COMPONENTS}{Refusal.__name__}"}}}


def answers(shape: Any, *errors: HTTPStatus, **success: Any) -> dict[int | str, dict[str, Any]]:
    """``responses`` of an endpoint: the shape of its answer, the common refusals, and ``errors``.

    ``success`` has further fields of the answer (``content``, ``links``).
    """
    return {200: {"model": shape, **success}, **_refusals(*sorted({*_EVERYWHERE, *errors}))}


def _refusals(*statuses: HTTPStatus) -> dict[int | str, dict[str, Any]]:
    return {str(int(status)): {"description": _DESCRIPTIONS[status], "content": _REFUSAL} for status in statuses}


def correct_openapi(app: FastAPI) -> None:
    """Add refusals to the OpenAPI page, those that any endpoint may give to vLLM's, and remove status 422 from ours.

    FastAPI adds 422 everywhere; vLLM's handlers turn it into 400.
    """
    everywhere = _refusals(*_EVERYWHERE, HTTPStatus.SERVICE_UNAVAILABLE)
    make = app.openapi

    def corrected() -> dict[str, Any]:
        page = make()
        refusal = Refusal.model_json_schema(ref_template=_COMPONENTS + "{model}")
        page["components"]["schemas"] |= {**refusal.pop("$defs"), Refusal.__name__: refusal}
        for operations in page["paths"].values():
            for operation in operations.values():
                if OUR_TAGS.intersection(operation.get("tags", ())):
                    operation["responses"].pop("422", None)
                else:
                    operation["responses"] = {**everywhere, **operation["responses"]}
        return page

    app.openapi = corrected  # type: ignore[method-assign]
