# SPDX-License-Identifier: Apache-2.0
"""``/v1/rag/chunks``: compute chunks ahead of time, list, inspect, pin and delete them."""

import json
from http import HTTPStatus
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from app.catalog.ingestion import ingestion_of
from app.documents.document import BadRequestError
from app.documents.rag_request import IngestRequest
from app.errors import error_response
from app.http.answers import CachedSegment, Deleted, IngestedChunk, IngestEnd, SegmentList
from app.http.openapi import JsonLines, answers
from app.routes.dependencies import AppState, CallersCatalog, Engine, Manager
from engine_ext.wire.vllm_compat import ErrorResponse

router = APIRouter(prefix="/v1/rag/chunks", tags=["Chunks"])
Key = Annotated[str, Path()]


def _links(key: str) -> dict[str, Any]:
    """OpenAPI links from a key in the answer to the endpoints that take it."""
    parameters = {"key": f"$response.body#/{key}"}
    return {name: {"operationId": f"{name}_chunk", "parameters": parameters} for name in ("get", "change", "delete")}


@router.post(
    "",
    summary="Compute chunks ahead of time, and register their ids",
    operation_id="ingest_chunks",
    response_model=None,
    response_class=JsonLines,
    responses=answers(
        list[IngestedChunk | IngestEnd],
        HTTPStatus.NOT_FOUND,
        HTTPStatus.CONFLICT,
        HTTPStatus.GONE,
        HTTPStatus.SERVICE_UNAVAILABLE,
        links=_links("0/key"),
    ),
)
async def ingest(request: IngestRequest, state: AppState, manager: Manager) -> JsonLines | JSONResponse:
    """Answers with JSON lines: one per finished chunk, with progress, then a summary.

    A chunk with an ``id`` is registered under it, in its namespace, for as long as it is cached: requests may then send
    ``{"id": …}`` alone. Finished chunks stay when the call is interrupted. The last call that names a chunk determines
    its ``pin`` and ``ttl_s``.
    """
    if not request.chunks:
        raise BadRequestError("a call brings at least one chunk", "chunks")
    lines = await ingestion_of(request, state, manager)
    if isinstance(lines, ErrorResponse):
        return error_response(lines)
    return JsonLines(json.dumps(line) + "\n" async for line in lines)


@router.get(
    "",
    summary="List cached segments",
    operation_id="list_chunks",
    response_model=None,
    responses=answers(SegmentList, HTTPStatus.CONFLICT, links=_links("data/0/key")),
)
async def list_chunks(
    catalog: CallersCatalog,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    cursor: Annotated[str | None, Query(description="next_cursor of the previous page")] = None,
    namespace: Annotated[str | None, Query(description="only segments of this namespace")] = None,
    id: Annotated[str | None, Query(description="only segments registered under this id")] = None,
    pinned: Annotated[bool | None, Query(description="only pinned segments, or only unpinned ones")] = None,
    state: Annotated[Literal["ready", "filling", "stored"] | None, Query(description="stored: in tiers only")] = None,
    kind: Annotated[Literal["chunk", "system"] | None, Query()] = None,
) -> dict[str, Any]:
    """Oldest first. A page begins behind the last entry of the previous page, even if that entry is gone."""
    return catalog.page(cursor, limit, id, namespace=namespace, pinned=pinned, state=state, kind=kind)


@router.get(
    "/{key}",
    summary="One cached segment",
    operation_id="get_chunk",
    response_model=None,
    responses=answers(CachedSegment, HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT),
)
async def get_chunk(key: Key, catalog: CallersCatalog) -> dict[str, Any]:
    """State, size, age and use of one segment."""
    return catalog.describe(catalog.find(key))


class ChunkChange(BaseModel):
    """A change of a cached segment."""

    model_config = ConfigDict(extra="forbid")

    pinned: bool = Field(strict=True, description="true: never evict it; false: evict it like others")


@router.patch(
    "/{key}",
    summary="Pin or unpin one cached segment",
    operation_id="change_chunk",
    response_model=None,
    responses=answers(CachedSegment, HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT),
)
async def change_chunk(key: Key, change: ChunkChange, catalog: CallersCatalog) -> dict[str, Any]:
    """Keeps the time to live. 409 if too much would be pinned (nine tenths of the pool)."""
    return catalog.describe(catalog.pin(key, pinned=change.pinned))


@router.delete(
    "/{key}",
    summary="Drop one cached segment",
    operation_id="delete_chunk",
    response_model=None,
    responses=answers(Deleted, HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT),
)
async def delete_chunk(key: Key, catalog: CallersCatalog, engine: Engine) -> dict[str, Any]:
    """Removes it from the pool and all tiers; running requests keep it until they end.

    Other prompts of its namespace leave the tiers as well: they may contain its text.
    """
    dropped, namespace = catalog.drop(key)
    await engine.cache.drop_from_tiers([dropped], namespace)
    return {"key": key, "deleted": True}
