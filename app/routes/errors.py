# SPDX-License-Identifier: Apache-2.0
"""HTTP statuses of errors from the rooms below, as vLLM's exception handlers answer them."""

from collections.abc import Callable, Coroutine
from http import HTTPStatus
from typing import Any, Final

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from vllm.exceptions import VLLMValidationError

from app.catalog.segments import UnknownSegmentError
from app.collections.retrievers import RetrieverFailedError
from app.collections.store import (
    CollectionConflictError,
    CollectionStorageError,
    DamagedCollectionError,
    UnknownCollectionError,
)
from app.documents.document import BadRequestError
from cache.errors import CapacityError, ChunkCacheError
from cache.segments.chunk_ids import GoneIdError, IdConflictError, UnknownIdError
from engine_ext.wire.vllm_compat import ErrorResponse, GracefulHTTPError

_STATUSES: Final[dict[type[ChunkCacheError], HTTPStatus]] = {
    UnknownIdError: HTTPStatus.NOT_FOUND,
    UnknownSegmentError: HTTPStatus.NOT_FOUND,
    GoneIdError: HTTPStatus.GONE,
    IdConflictError: HTTPStatus.CONFLICT,
    CapacityError: HTTPStatus.CONFLICT,
    RetrieverFailedError: HTTPStatus.BAD_GATEWAY,
    UnknownCollectionError: HTTPStatus.NOT_FOUND,
    CollectionConflictError: HTTPStatus.CONFLICT,
    CollectionStorageError: HTTPStatus.INSUFFICIENT_STORAGE,
    DamagedCollectionError: HTTPStatus.INSUFFICIENT_STORAGE,
}


class DocumentsRoute(APIRoute):
    """An endpoint over documents or cached chunks: answers their errors with the right status."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's handler, errors translated."""
        handle = super().get_route_handler()

        async def handled(request: Request) -> Response:
            try:
                return await handle(request)
            except BadRequestError as error:
                raise VLLMValidationError(str(error), parameter=error.parameter) from error
            except tuple(_STATUSES) as error:
                raise GracefulHTTPError(str(error), _STATUSES[type(error)]) from error

        return handled


def error_response(answer: ErrorResponse) -> JSONResponse:
    """An error that vLLM's serving layer returned instead of an answer."""
    return JSONResponse(answer.model_dump(), status_code=answer.error.code)
