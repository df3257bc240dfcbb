# SPDX-License-Identifier: Apache-2.0
"""The HTTP statuses of errors from the rooms below, in endpoints and in middleware."""

from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any, Final

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from app.collections.retrievers import RetrieverFailedError
from app.collections.store import (
    CollectionConflictError,
    CollectionStorageError,
    DamagedCollectionError,
    UnknownCollectionError,
)
from app.documents.document import BadRequestError
from app.http.refusals import REASONS, refusal
from cache.errors import CapacityError, UnknownSegmentError
from cache.segments.chunk_ids import GoneIdError, IdConflictError, UnknownIdError
from engine_ext.client.defects import defect_of, is_defect
from engine_ext.wire.vllm_compat import ErrorResponse

Handler = Callable[[Request, Any], Response | Awaitable[Response]]

_STATUSES: Final[dict[type[Exception], HTTPStatus]] = {
    BadRequestError: HTTPStatus.BAD_REQUEST,
    UnknownIdError: HTTPStatus.NOT_FOUND,
    UnknownSegmentError: HTTPStatus.NOT_FOUND,
    UnknownCollectionError: HTTPStatus.NOT_FOUND,
    GoneIdError: HTTPStatus.GONE,
    IdConflictError: HTTPStatus.CONFLICT,
    CapacityError: HTTPStatus.CONFLICT,
    CollectionConflictError: HTTPStatus.CONFLICT,
    RetrieverFailedError: HTTPStatus.BAD_GATEWAY,
    CollectionStorageError: HTTPStatus.INSUFFICIENT_STORAGE,
    DamagedCollectionError: HTTPStatus.INSUFFICIENT_STORAGE,
}
REFUSED: Final = tuple(_STATUSES)


def answer_errors(app: FastAPI) -> None:
    """Lets the app's endpoints raise these errors; failures of our own code get 500, of whatever type they are."""

    async def refused(_: Request, error: Exception) -> JSONResponse:
        return refusal_of(error)

    for each in REFUSED:
        app.add_exception_handler(each, refused)
    for kind in (ValueError, TypeError, OverflowError):
        if (vllms := app.exception_handlers.get(kind)) is not None:
            app.add_exception_handler(kind, _unless_defect(vllms))
    app.add_exception_handler(NotImplementedError, _unless_defect(_not_implemented))


def _not_implemented(_: Request, error: Exception) -> Response:
    """The refusal of what vLLM can't do: its own, 501, looks to proxies and clients like a server that fails."""
    return refusal(HTTPStatus.BAD_REQUEST, "not_implemented", str(error))


def _unless_defect(handler: Handler) -> Handler:
    """The ``handler`` of errors that are the client's, unless our own code has raised them."""

    async def handled(request: Request, error: Exception) -> Response:
        if is_defect(error):
            return refusal(HTTPStatus.INTERNAL_SERVER_ERROR, "internal_error", str(defect_of(error)))
        answer = handler(request, error)
        return answer if isinstance(answer, Response) else await answer

    return handled


def refusal_of(error: Exception, parameter: str | None = None) -> JSONResponse:
    """The response to a request that raised one of :data:`REFUSED`.

    ``parameter`` is the field at fault, for errors that don't know it.
    """
    status = next(status for each, status in _STATUSES.items() if isinstance(error, each))
    return refusal(status, REASONS[status], str(error), parameter=getattr(error, "parameter", parameter))


def error_response(answer: ErrorResponse) -> JSONResponse:
    """An error that vLLM's serving layer returned instead of an answer."""
    return JSONResponse(answer.model_dump(), status_code=answer.error.code)
