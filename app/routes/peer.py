# SPDX-License-Identifier: Apache-2.0
"""Cached chunks for other replicas of the same model (:mod:`app.cluster.peers`)."""

import hmac
from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response

from app.cluster.peers import FINGERPRINT_HEADER, PATH
from app.settings import Settings
from cache.segments.hashing import ChunkHash
from engine_ext.chunks.chunk_cache import CacheOff
from engine_ext.chunks.transfers import TransferError
from engine_ext.client.engine import ChunkEngine
from engine_ext.wire.vllm_compat import GracefulHTTPError

router = APIRouter(include_in_schema=False)


@router.get(PATH)
async def chunk(
    request: Request, key: Annotated[str, Path(pattern="^([0-9a-f]{2}){1,64}$")], rank: Annotated[int, Query(ge=0)]
) -> Response:
    """One worker's file of a cached segment; 401 without the secret, 409 for an engine whose KV is another."""
    settings: Settings = request.app.state.tessera_settings
    engine: ChunkEngine = request.app.state.engine_client
    _check_secret(request, settings)
    cache = engine.cache
    if isinstance(cache, CacheOff) or (transfers := cache.transfers) is None:
        raise GracefulHTTPError("this replica shares nothing", HTTPStatus.NOT_FOUND)
    if request.headers.get(FINGERPRINT_HEADER) != cache.config.fingerprint:
        raise GracefulHTTPError("this replica's KV is that of another engine", HTTPStatus.CONFLICT)
    if rank >= transfers.num_workers:
        raise GracefulHTTPError(f"this replica has no worker {rank}", HTTPStatus.NOT_FOUND)
    lease = cache.manager.hold(ChunkHash(bytes.fromhex(key)))
    if lease is None:
        raise GracefulHTTPError(f"no cached segment has the key {key}", HTTPStatus.NOT_FOUND)
    try:
        file = await transfers.read(lease.chunks[0].entry, rank)
    except TransferError as error:
        raise GracefulHTTPError(str(error), HTTPStatus.NOT_FOUND) from error
    finally:
        cache.release(lease)
    return Response(file, media_type="application/octet-stream")


def _check_secret(request: Request, settings: Settings) -> None:
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    secret = settings.peer_secret.get_secret_value() if settings.peer_secret is not None else None
    is_right = secret is not None and hmac.compare_digest(given.strip().encode(), secret.encode())
    if scheme.lower() != "bearer" or not is_right:
        raise GracefulHTTPError("this takes the peers' secret (--peer-secret)", HTTPStatus.UNAUTHORIZED)
