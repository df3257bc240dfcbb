# SPDX-License-Identifier: Apache-2.0
"""The server's routes of files and collections, without an engine: passages are stored and found, but not computed.

python -m tests.support.engineless FOLDER PORT
"""

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from app.access.client_limits import ClientLimitsMiddleware
from app.catalog import collection_ingestion
from app.collections.retrieval import Retrieval
from app.collections.retrievers import Bm25
from app.collections.store import Collections
from app.documents.extraction import Extraction
from app.documents.rag_request import IngestRequest
from app.errors import answer_errors
from app.http.refusals import RefusalMiddleware, refusal
from app.routes import collections, split
from tests.app.helpers import cache_with
from tests.cache.helpers import make_manager
from tests.support.context import make_context
from tests.support.words import TOKENIZER


def make_app(folder: Path) -> FastAPI:
    """The routes, with their middleware; collections are in ``folder``."""
    context = make_context(extraction=Extraction(TOKENIZER), retrieval=Retrieval(Collections(folder), Bm25()))

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        context.extraction.close()

    app = FastAPI(lifespan=lifespan)
    app.include_router(collections.router)
    app.include_router(split.router)
    answer_errors(app)
    app.add_exception_handler(RequestValidationError, _refused)
    app.add_middleware(ClientLimitsMiddleware, max_body_size=context.settings.max_body_size)
    app.add_middleware(RefusalMiddleware)
    app.state.tessera = context
    cache = cache_with(make_manager(10))
    cache.known_ids = _no_ids
    app.state.engine_client = SimpleNamespace(cache=cache)
    return app


async def _refused(_: Request, error: Exception) -> JSONResponse:
    """As vLLM's own handler answers."""
    return refusal(HTTPStatus.BAD_REQUEST, "bad_request", str(error))


async def _no_ids(*_: Any) -> None:
    """No passage has KV."""


async def computed(request: IngestRequest, *_: Any) -> AsyncIterator[dict[str, Any]]:
    """Stands in for ``ingestion_of``, and says that all passages are computed."""

    async def lines() -> AsyncIterator[dict[str, Any]]:
        total = len(request.chunks)
        for number, chunk in enumerate(request.chunks, 1):
            progress = {"done": number, "total": total}
            yield {"index": number - 1, "id": chunk.id, "key": "00", "status": "filled", "progress": progress}
        yield {"summary": {"hit": 0, "loaded": 0, "filled": total, "waited": 0, "failed": 0}}

    return lines()


def main() -> None:
    folder, port = sys.argv[1:]
    collection_ingestion.ingestion_of = computed
    uvicorn.run(make_app(Path(folder)), port=int(port), log_level="warning")


if __name__ == "__main__":
    main()
