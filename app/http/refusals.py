# SPDX-License-Identifier: Apache-2.0
"""Refusals: OpenAI's error object as vLLM returns it, with a stable ``reason``.

``docs/api.md`` lists the reasons.
"""

import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import Final, Literal

from starlette.datastructures import MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.http.messages import held

RETRY_AFTER_S: Final = 1
"""Queues usually have room again within a second, and a retry is cheap: a refused request never reaches the engine.
Well-behaved clients double the time themselves."""

Reason = Literal[
    "bad_request",
    "body_too_large",
    "cache_state",
    "chunk_gone",
    "client_too_slow",
    "cross_site",
    "engine_died",
    "internal_error",
    "invalid_api_key",
    "limit_exceeded",
    "method_not_allowed",
    "missing_api_key",
    "no_replica",
    "not_found",
    "not_implemented",
    "not_now",
    "peers_only",
    "refused",
    "retriever_failed",
    "role_missing",
    "stopping",
    "storage_failed",
]
REASONS: Final[dict[int, Reason]] = {
    400: "bad_request",
    403: "peers_only",
    404: "not_found",
    405: "method_not_allowed",
    409: "cache_state",
    410: "chunk_gone",
    413: "body_too_large",
    422: "bad_request",
    429: "limit_exceeded",
    500: "internal_error",
    502: "retriever_failed",
    503: "not_now",
    507: "storage_failed",
}
"""Of refusals that have none of their own, by status."""


def refusal(
    status: HTTPStatus,
    reason: Reason,
    message: str,
    *,
    parameter: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    """A refusal as a response. ``parameter`` is the path of the field at fault."""
    kind = "BadRequestError" if status is HTTPStatus.BAD_REQUEST else status.phrase  # vLLM's words
    detail = {"message": message, "type": kind, "param": parameter, "code": int(status), "reason": reason}
    return JSONResponse({"error": detail}, status, headers)


class RefusalMiddleware:
    """Adds what refusals lack, vLLM's included: a reason, by status, and ``Retry-After`` to those with status 503."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def complete(start: Message, parts: list[bytes]) -> None:
            body = _with_reason(b"".join(parts), start["status"])
            MutableHeaders(scope=start)["content-length"] = str(len(body))
            await send(start)
            await send({"type": "http.response.body", "body": body})

        await self._app(scope, receive, held(send, _is_refusal_in_json, complete))


def _is_refusal_in_json(start: Message) -> bool:
    """Whether a refusal with a JSON body begins. Adds ``Retry-After`` to those that come without it."""
    if start["status"] < HTTPStatus.BAD_REQUEST:
        return False
    headers = MutableHeaders(scope=start)
    if start["status"] == HTTPStatus.SERVICE_UNAVAILABLE:
        headers.setdefault("retry-after", str(RETRY_AFTER_S))
    return headers.get("content-type", "").startswith("application/json")


def _with_reason(body: bytes, status: int) -> bytes:
    try:
        said = json.loads(body)
    except ValueError:
        return body
    error = said.get("error") if isinstance(said, dict) else None
    if not isinstance(error, dict):
        detail = said.get("detail") if isinstance(said, dict) else None  # FastAPI's own shape
        error = {"message": str(detail or said), "type": HTTPStatus(status).phrase, "param": None, "code": status}
    return json.dumps({"error": {**error, "reason": error.get("reason") or REASONS.get(status, "refused")}}).encode()
