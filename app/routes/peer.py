# SPDX-License-Identifier: Apache-2.0
"""Serves cached chunks to other replicas of the same model (:mod:`app.cluster.peers`).

:class:`app.access.middleware.AccessMiddleware` lets in what peers have signed, and nothing else.
"""

from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Annotated, Any, Final

from fastapi import APIRouter, Body, Header, Path, Query
from fastapi.responses import StreamingResponse

from app.cluster.peers import FILL_PATH, PATH
from app.routes.dependencies import Engine
from cache.errors import FullAttentionError
from cache.segments.hashing import ChunkHash
from engine_ext.chunks.cache_off import CacheOff
from engine_ext.chunks.chunk_cache import ChunkCache
from engine_ext.chunks.transfers import TransferError
from engine_ext.client.peer_fills import fill_for_peer
from engine_ext.wire.peer_fill import PeerFill
from engine_ext.wire.vllm_compat import GracefulHTTPError
from replicas.peer_file import FINGERPRINT_HEADER

router = APIRouter(include_in_schema=False)

_PART_BYTES: Final = 1 << 20
"""Bytes handed to the connection at once."""


@router.get(PATH)
async def chunk(
    key: Annotated[str, Path(pattern="^([0-9a-f]{2}){1,64}$")],
    part: Annotated[int, Query(ge=0)],
    engine: Engine,
    fingerprint: Annotated[str | None, Header(alias=FINGERPRINT_HEADER)] = None,
) -> StreamingResponse:
    """A part of a segment's KV, from pool or tiers. 409 for another engine's fingerprint."""
    cache = engine.cache
    if isinstance(cache, CacheOff) or (transfers := cache.transfers) is None:
        raise GracefulHTTPError("this replica shares nothing", HTTPStatus.NOT_FOUND)
    if part >= transfers.parts.num_parts:
        raise GracefulHTTPError(f"this replica has no part {part}", HTTPStatus.NOT_FOUND)
    _check_fingerprint(fingerprint, cache.config.peer_fingerprint)
    try:
        file = await cache.file(ChunkHash(bytes.fromhex(key)), part)
    except TransferError as error:
        raise GracefulHTTPError(str(error), HTTPStatus.NOT_FOUND) from error
    if file is None:
        raise GracefulHTTPError(f"no segment here has the key {key}", HTTPStatus.NOT_FOUND)
    headers = {"content-length": str(len(file))}
    return StreamingResponse(_parts(file), media_type="application/octet-stream", headers=headers)


@router.post(FILL_PATH, status_code=HTTPStatus.NO_CONTENT)
async def fill(
    body: Annotated[dict[str, Any], Body()],
    engine: Engine,
    fingerprint: Annotated[str | None, Header(alias=FINGERPRINT_HEADER)] = None,
) -> None:
    """Computes segments for a replica that decodes, which then fetches them. 409 as above, 503 if it can't."""
    cache = engine.cache
    _check_fingerprint(fingerprint, cache.config.peer_fingerprint if isinstance(cache, ChunkCache) else None)
    try:
        await fill_for_peer(engine.llm, cache, PeerFill.from_dict(body))
    except ValueError as error:
        raise GracefulHTTPError(str(error), HTTPStatus.BAD_REQUEST) from error
    except FullAttentionError as error:
        raise GracefulHTTPError(str(error), HTTPStatus.SERVICE_UNAVAILABLE) from error


async def _parts(file: memoryview) -> AsyncIterator[memoryview]:
    for start in range(0, len(file), _PART_BYTES):
        yield file[start : start + _PART_BYTES]


def _check_fingerprint(given: str | None, own: str | None) -> None:
    if own is None or given != own:
        raise GracefulHTTPError("this replica has another engine fingerprint", HTTPStatus.CONFLICT)
