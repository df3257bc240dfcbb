# SPDX-License-Identifier: Apache-2.0
"""``POST /v1/rag/split``: splits a file into chunks; computes and stores nothing."""

import asyncio
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import PurePath
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from vllm.exceptions import VLLMValidationError
from xxhash import xxh3_64_hexdigest

from app.documents.files import SUFFIXES, UnreadableFileError, pieces_of, text_of
from app.documents.splitting import CountTokens, Piece
from app.http.answers import Split
from app.http.openapi import answers
from app.routes.dependencies import Renderer, RequestSettings
from engine_ext.wire.vllm_compat import GracefulHTTPError

router = APIRouter(prefix="/v1/rag", tags=["Chunks"])

DEFAULT_MAX_TOKENS = 512
_SPLITTING = asyncio.Semaphore(2)
"""Files read concurrently; others wait."""


@router.post(
    "/split",
    summary="Split a text, Markdown or PDF file into chunks",
    response_model=None,
    responses=answers(
        Split,
        HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
        HTTPStatus.SERVICE_UNAVAILABLE,
    ),
    openapi_extra={"requestBody": {"content": {"application/octet-stream": {}}, "required": True}},
)
async def split(
    request: Request,
    settings: RequestSettings,
    renderer: Renderer,
    filename: Annotated[str, Query(min_length=1, max_length=255, description="its extension determines the file type")],
    max_tokens: Annotated[int | None, Query(ge=16, description="most tokens in a chunk; default: 512")] = None,
) -> dict[str, list[dict[str, Any]]]:
    """The body is the file. Markdown is split at its headings, which become titles; other text at paragraphs.

    Without ``tokens``, the chunks are valid for ``/v1/rag/chat`` and ``/v1/rag/chunks``. An ``id`` depends on the
    chunk's content. 415 for another type of file.
    """
    limit = min(max_tokens or DEFAULT_MAX_TOKENS, settings.chunk_max_tokens)
    suffix = PurePath(filename).suffix.lower()
    if suffix not in SUFFIXES:
        raise GracefulHTTPError(
            f"{filename!r} can't be split; supported types: {', '.join(SUFFIXES)}",
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
        )
    file = await request.body()
    async with _SPLITTING:
        text = await _text(file, suffix)
        chunks = await asyncio.to_thread(_chunks, text, suffix, filename, limit, renderer.num_tokens)
    if not chunks:
        raise VLLMValidationError(f"there is no text in {filename!r}", parameter="body")
    return {"chunks": chunks}


async def _text(file: bytes, suffix: str) -> str:
    """Extracts the text; raises ``VLLMValidationError`` (400) if there is none."""
    try:
        return await text_of(file, suffix)
    except UnreadableFileError as error:
        raise VLLMValidationError(str(error), parameter="body") from error


def _chunks(text: str, suffix: str, filename: str, limit: int, count: CountTokens) -> list[dict[str, Any]]:
    return list(_described(pieces_of(text, suffix, limit, count), filename))


def _described(pieces: Iterator[Piece], filename: str) -> Iterator[dict[str, Any]]:
    for number, (document, num_tokens) in enumerate(pieces, start=1):
        digest = xxh3_64_hexdigest(document.render().encode())[:8]
        yield {
            "id": f"{filename}#{number}-{digest}",
            "title": document.title,
            "text": document.text,
            "tokens": num_tokens,
        }
