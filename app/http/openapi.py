# SPDX-License-Identifier: Apache-2.0
"""Our endpoints on the OpenAPI page: the shape of each answer, and the refusals that are possible."""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from fastapi.responses import StreamingResponse

from app.http.refusals import Reason
from cache.report import Shape

OUR_TAGS = frozenset({"RAG", "Chunks", "Chunk cache", "Cluster"})
EVENT_STREAM: Mapping[str, Any] = {"text/event-stream": {"schema": {"type": "string"}}}


class JsonLines(StreamingResponse):
    """One JSON object per line."""

    media_type = "application/x-ndjson"


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
    HTTPStatus.UNAUTHORIZED: "No API key that is known came, and the server asks for one.",
    HTTPStatus.FORBIDDEN: "The key's tenant has not the role that this needs.",
    HTTPStatus.NOT_FOUND: "There is no such model, chunk or registry.",
    HTTPStatus.REQUEST_TIMEOUT: "The body did not come in time.",
    HTTPStatus.CONFLICT: "It does not go with the state of the cache, which `error.message` tells.",
    HTTPStatus.GONE: "The chunk of an id is no longer cached: send its text again.",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "The body, or the file, is too large.",
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE: "No such file can be split.",
    HTTPStatus.TOO_MANY_REQUESTS: "The tenant's limits are used up; `Retry-After` says when to ask.",
    HTTPStatus.NOT_IMPLEMENTED: "The model, or the server as it is configured, can't do this.",
    HTTPStatus.SERVICE_UNAVAILABLE: "Not now: the queue is full, or the server stops; `Retry-After` says when to ask.",
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
    """``responses`` of an endpoint: its answer's shape, and what it may be refused with besides what all may be.

    ``success`` is more about the answer (``content``, ``links``).
    """
    found: dict[int | str, dict[str, Any]] = {200: {"model": shape, **success}}
    for status in sorted({*_EVERYWHERE, *errors}):
        found[int(status)] = {"description": _DESCRIPTIONS[status], "content": _REFUSAL}
    return found


def correct_openapi(app: FastAPI) -> None:
    """Puts the shape of refusals on the OpenAPI page, and takes status 422 from our endpoints.

    FastAPI adds that one everywhere; vLLM's handlers make it 400.
    """
    make = app.openapi

    def corrected() -> dict[str, Any]:
        page = make()
        refusal = Refusal.model_json_schema(ref_template=_COMPONENTS + "{model}")
        page["components"]["schemas"] |= {**refusal.pop("$defs"), Refusal.__name__: refusal}
        for operations in page["paths"].values():
            for operation in operations.values():
                if OUR_TAGS.intersection(operation.get("tags", ())):
                    operation["responses"].pop("422", None)
        return page

    app.openapi = corrected  # type: ignore[method-assign]
