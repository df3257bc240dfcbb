# SPDX-License-Identifier: Apache-2.0
"""``POST /v1/rag/split``: splits a file into chunks; computes and stores nothing."""

from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request

from app.collections.passages import LONGEST_NAME, piece_id
from app.documents.document import BadRequestError
from app.documents.readers import READERS, UnreadableFileError, suffix_of
from app.documents.splitting import LEAST_TOKENS, Piece
from app.http.answers import Split
from app.http.openapi import JsonList, answers
from app.routes.dependencies import Context
from engine_ext.client.threads import in_thread
from engine_ext.wire.vllm_compat import GracefulHTTPError

router = APIRouter(prefix="/v1/rag", tags=["Chunks"])

DEFAULT_MAX_TOKENS = 512


@router.post(
    "/split",
    summary="Split a file into chunks",
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
    context: Context,
    filename: Annotated[str, Query(min_length=1, max_length=LONGEST_NAME, description="its suffix tells the type")],
    max_tokens: Annotated[int | None, Query(ge=LEAST_TOKENS, description="most in a chunk; default: 512")] = None,
) -> JsonList:
    """The body is the file. Markdown is split at its headings, which become titles; other text at paragraphs.

    Without ``tokens``, the chunks are valid for ``/v1/rag/chat`` and ``/v1/rag/chunks``. An ``id`` depends on the
    chunk's content. 415 for another type of file.
    """
    limit = context.settings.most_tokens(max_tokens or DEFAULT_MAX_TOKENS)
    if suffix_of(filename) not in READERS:
        raise GracefulHTTPError(
            f"{filename!r} can't be split; supported types: {', '.join(READERS)}", HTTPStatus.UNSUPPORTED_MEDIA_TYPE
        )
    # A large body is joined in a thread: the event loop goes on meanwhile.
    file = await in_thread(b"".join, [part async for part in request.stream()])
    try:
        pieces = await context.extraction.split(file, filename, limit)
    except UnreadableFileError as error:
        raise BadRequestError(str(error), "body") from error
    return JsonList({}, "chunks", (_chunk(filename, *each) for each in enumerate(pieces, start=1)))


def _chunk(filename: str, number: int, piece: Piece) -> dict[str, Any]:
    return {
        "id": piece_id(filename, number, piece),
        "title": piece.title,
        "text": piece.text,
        "tokens": piece.num_tokens,
        "metadata": {"page": piece.page, "start": piece.start, "end": piece.end},
    }
