# SPDX-License-Identifier: Apache-2.0
"""Answers that say no: OpenAI's error shape as vLLM gives it, and a ``reason`` that never changes.

``docs/api.md`` lists the reasons for those who write clients.
"""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Literal

from starlette.responses import JSONResponse

Reason = Literal[
    "bad_request",
    "body_too_large",
    "client_too_slow",
    "invalid_api_key",
    "limit_exceeded",
    "missing_api_key",
    "no_replica",
    "role_missing",
    "stopping",
]


def refusal(
    status: HTTPStatus,
    reason: Reason,
    message: str,
    *,
    parameter: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    """The answer to a request that is not served. ``parameter`` is the path of the field at fault."""
    kind = "BadRequestError" if status is HTTPStatus.BAD_REQUEST else status.phrase  # vLLM's words
    detail = {"message": message, "type": kind, "param": parameter, "code": int(status), "reason": reason}
    return JSONResponse({"error": detail}, status, headers)
