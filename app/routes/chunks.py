# SPDX-License-Identifier: Apache-2.0
"""``/v1/rag/chunks``: compute chunks ahead of time, list, inspect, pin and delete them."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from http import HTTPStatus
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field
from vllm.exceptions import VLLMValidationError

from app.documents.document import Document
from app.documents.rag_request import RagRequest, chat_completion, system_and_user
from app.http.answers import CachedSegment, Deleted, IngestedChunk, IngestEnd, JsonLines, SegmentList, answers
from app.prompt.rendering import open_ticket, render
from app.prompt.segments import SegmentRenderer
from cache.errors import CapacityError
from cache.eviction.removal import Removal
from cache.manager import ChunkCacheManager
from cache.positions.layout import Chunk
from cache.segments.chunk_ids import IdConflictError, RegisteredText
from cache.segments.hashing import ChunkHash
from cache.segments.holdings import DocumentKey
from cache.segments.index import ChunkKVCache, EntryState
from engine_ext.client.background import Ingested, Ingestion
from engine_ext.client.engine import ChunkEngine
from engine_ext.client.resolved import ResolvedRequest
from engine_ext.wire.caller import CALLER
from engine_ext.wire.request import FullAttentionError, RequestContext
from engine_ext.wire.vllm_compat import ErrorResponse, GracefulHTTPError
from replicas.document_keys import id_key

router = APIRouter(prefix="/v1/rag/chunks", tags=["Chunks"])


class IngestRequest(RagRequest):
    """Chunks to compute behind ``system``, with the fields of chat completions that change the rendered prompt."""

    model_config = ConfigDict(
        extra="allow",
        json_schema_extra={
            "example": {
                "system": "Answer from the documents.",
                "chunks": [{"id": "falcon", "text": "The access code of Falcon is 7342."}],
                "pin": True,
                "ttl_s": 86400,
            }
        },
    )

    pin: bool = Field(False, strict=True, description="never evict these chunks; they go by DELETE, clear or ttl_s")
    ttl_s: float | None = Field(
        None,
        gt=0,
        strict=True,
        allow_inf_nan=False,
        description="seconds after which the chunks are dropped; default: never",
    )


def _links(key: str) -> dict[str, Any]:
    """Where a key of the answer leads to, for clients that follow OpenAPI's links."""
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
        HTTPStatus.NOT_IMPLEMENTED,
        HTTPStatus.SERVICE_UNAVAILABLE,
        links=_links("0/key"),
    ),
)
async def ingest(request: IngestRequest, raw_request: Request) -> JsonLines | JSONResponse:
    """Answers with JSON lines: one per chunk, with progress, as it is done; the last one is the summary.

    A chunk with an ``id`` is registered under it, in its namespace, for as long as it is cached: requests may then send
    ``{"id": …}`` alone. What was done stays done when the call is interrupted. ``pin`` and ``ttl_s`` of the last call
    that names a chunk count.
    """
    state = raw_request.app.state
    manager = _manager(state.engine_client)
    limit = state.tessera_settings.chunk_max_per_call
    if not 1 <= len(request.chunks) <= limit:
        raise VLLMValidationError(
            f"a call may bring 1 to {limit} chunks (--chunk-max-per-call), not {len(request.chunks)}",
            parameter="chunks",
        )
    ticket, documents = open_ticket(request, state)
    rendered = await _frame(request, ticket, state)
    if isinstance(rendered, ErrorResponse):
        return JSONResponse(rendered.model_dump(), status_code=rendered.error.code)
    _check_ids(manager, rendered.scope.namespace, documents)
    lines = _Ingest(request, state.engine_client, rendered, documents, ticket.document_keys).lines()
    return JsonLines(lines)


@router.get(
    "",
    summary="List cached segments",
    operation_id="list_chunks",
    response_model=None,
    responses=answers(SegmentList, HTTPStatus.CONFLICT, links=_links("data/0/key")),
)
async def list_chunks(
    raw_request: Request,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    cursor: Annotated[str | None, Query(description="next_cursor of the page before")] = None,
    namespace: Annotated[str | None, Query(description="only of this namespace")] = None,
    id: Annotated[str | None, Query(description="only what is registered under this id")] = None,
    pinned: Annotated[bool | None, Query(description="only pinned ones, or only others")] = None,
    state: Annotated[Literal["ready", "filling"] | None, Query()] = None,
    kind: Annotated[Literal["chunk", "system"] | None, Query()] = None,
) -> dict[str, Any]:
    """Oldest first. A page begins behind the entry at which the one before ended, also if that is gone by now."""
    manager = _manager(raw_request.app.state.engine_client)
    manager.expire()
    after = _parse_cursor(cursor)
    wanted = {"namespace": namespace, "pinned": pinned, "state": state, "kind": kind}
    filters = {name: value for name, value in wanted.items() if value is not None}
    page: list[dict[str, Any]] = []
    last = after
    for entry in manager.index:
        if entry.tag <= after or not _may_see(entry) or (id is not None and id not in manager.ids.ids(entry.key)):
            continue
        shown = _describe(manager, entry)
        if any(shown[name] != value for name, value in filters.items()):
            continue
        if len(page) == limit:
            return {"object": "list", "data": page, "next_cursor": f"{last:x}"}
        page.append(shown)
        last = entry.tag
    return {"object": "list", "data": page, "next_cursor": None}


@router.get(
    "/{key}",
    summary="One cached segment",
    operation_id="get_chunk",
    response_model=None,
    responses=answers(CachedSegment, HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT),
)
async def get_chunk(key: Annotated[str, Path()], raw_request: Request) -> dict[str, Any]:
    """State, size, age and use of one segment."""
    manager = _manager(raw_request.app.state.engine_client)
    return _describe(manager, _entry(manager, key))


class ChunkChange(BaseModel):
    """What to change of a cached segment."""

    model_config = ConfigDict(extra="forbid")

    pinned: bool = Field(strict=True, description="never evict it; or, false, evict it like others")


@router.patch(
    "/{key}",
    summary="Pin or unpin one cached segment",
    operation_id="change_chunk",
    response_model=None,
    responses=answers(CachedSegment, HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT),
)
async def change_chunk(key: Annotated[str, Path()], change: ChunkChange, raw_request: Request) -> dict[str, Any]:
    """Its time to live stays. 409 if pinning it would leave too little for others (``--chunk-cache-max-pinned``)."""
    manager = _manager(raw_request.app.state.engine_client)
    entry = _entry(manager, key)
    try:
        manager.retain(entry, pinned=change.pinned, expires_at=entry.expires_at)
    except CapacityError as error:
        raise GracefulHTTPError(str(error), HTTPStatus.CONFLICT) from error
    return _describe(manager, entry)


@router.delete(
    "/{key}",
    summary="Drop one cached segment",
    operation_id="delete_chunk",
    response_model=None,
    responses=answers(Deleted, HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT),
)
async def delete_chunk(key: Annotated[str, Path()], raw_request: Request) -> dict[str, Any]:
    """No later request finds it, in the pool or in a tier; those that run with it now keep it until they end."""
    engine: ChunkEngine = raw_request.app.state.engine_client
    manager = _manager(engine)
    entry = _entry(manager, key)
    manager.detach(entry, Removal.DELETED)
    await engine.cache.drop_from_tiers([entry.key])
    return {"key": key, "deleted": True}


class _Ingest:
    """One call of ``POST /v1/rag/chunks``."""

    def __init__(
        self,
        request: IngestRequest,
        engine: ChunkEngine,
        rendered: ResolvedRequest,
        documents: list[Document],
        document_keys: Sequence[DocumentKey],
    ) -> None:
        self.request = request
        self.engine = engine
        self.manager = _manager(engine)
        self.rendered = rendered
        self.documents = documents
        self.document_keys = document_keys
        self.expires_at = None if request.ttl_s is None else self.manager.clock() + request.ttl_s
        self.statuses: Counter[str] = Counter()
        self.keys: set[str] = set()
        self.tokens = 0

    async def lines(self) -> AsyncIterator[str]:
        """A JSON line per chunk, and the summary."""
        started = time.monotonic()
        background, renderer = self.engine.background, self.engine.renderer
        chunks = await asyncio.to_thread(_chunks, renderer, self.documents, self.rendered.scope.namespace)
        ingestion = Ingestion(self.rendered, self._keep)
        done = 0
        async for result in background.run(ingestion, chunks):
            part = result.chunk.part
            done += part is None or part[0] == part[1]
            yield json.dumps(self._line(result, done)) + "\n"
        yield json.dumps({"summary": self._summary(time.monotonic() - started)}) + "\n"

    def _keep(self, chunk: Chunk, entry: ChunkKVCache) -> None:
        ids, namespace = self.manager.ids, self.rendered.scope.namespace
        document = self.documents[chunk.document]
        content = RegisteredText(document.text, document.title)
        self.manager.name(self.document_keys[chunk.document], entry)
        if chunk.id is not None:
            # Another call may have given the id another text meanwhile; then this one's is not to be pinned.
            ids.check(namespace, chunk.id, content)
        self.manager.retain(entry, pinned=self.request.pin, expires_at=self.expires_at)
        if chunk.id is not None:
            ids.register(namespace, chunk.id, content, entry.key)
            self.manager.name(id_key(namespace, chunk.id), entry)

    def _line(self, result: Ingested, done: int) -> dict[str, Any]:
        chunk = result.chunk
        self.statuses[result.status or "failed"] += 1
        if result.status is not None and result.key is not None:
            self.keys.add(result.key)
            self.tokens += chunk.num_tokens
        return {
            **chunk.label,
            "key": result.key,
            "tokens": chunk.num_tokens,
            "status": result.status or "failed",
            **({"error": result.error} if result.error else {}),
            "progress": {"done": done, "total": len(self.documents)},
        }

    def _summary(self, seconds: float) -> dict[str, Any]:
        cached = sum(self.manager.index.by_key(ChunkHash(bytes.fromhex(key))) is not None for key in self.keys)
        return {
            "documents": len(self.documents),
            **{name: self.statuses[name] for name in ("hit", "loaded", "filled", "waited", "failed")},
            "tokens": self.tokens,
            "cached": cached,
            "evicted": len(self.keys) - cached,
            "seconds": round(seconds, 3),
        }


def _chunks(renderer: SegmentRenderer, documents: list[Document], namespace: str) -> list[Chunk]:
    return [chunk for i, document in enumerate(documents) for chunk in renderer.chunks(document, i, namespace)]


async def _frame(request: IngestRequest, ticket: RequestContext, state: Any) -> ResolvedRequest | ErrorResponse:
    """The request rendered with one stand-in for its chunks: their number does not matter, and they may not fit."""
    frame = RequestContext(ticket.options, (None,))
    with state.tessera_marks.issue(frame, [Document("-")]) as marked:
        messages = system_and_user(request.system, marked + "?")
        return await render(state, frame, chat_completion(request, messages), for_run=False)


def _check_ids(manager: ChunkCacheManager, namespace: str, documents: list[Document]) -> None:
    """Raises ``GracefulHTTPError`` (409) for an id with two texts, in the call or before it."""
    given: dict[str, RegisteredText] = {}
    for document in documents:
        if document.id is None:
            continue
        content = RegisteredText(document.text, document.title)
        if given.setdefault(document.id, content) != content:
            raise GracefulHTTPError(f"chunk id {document.id!r} is given with two texts", HTTPStatus.CONFLICT)
        try:
            manager.ids.check(namespace, document.id, content)
        except IdConflictError as error:
            raise GracefulHTTPError(str(error), HTTPStatus.CONFLICT) from error


def _manager(engine: ChunkEngine) -> ChunkCacheManager:
    try:
        return engine.cache.usable().manager
    except FullAttentionError as error:
        raise GracefulHTTPError(f"the chunk cache is off: {error}", HTTPStatus.CONFLICT) from error


def _entry(manager: ChunkCacheManager, key: str) -> ChunkKVCache:
    try:
        digest = bytes.fromhex(key)
    except ValueError as error:
        raise VLLMValidationError("a key is hexadecimal, as reports and lists give it", parameter="key") from error
    manager.expire()
    entry = manager.index.by_key(ChunkHash(digest))
    if entry is None or not _may_see(entry):
        raise GracefulHTTPError(f"no cached segment has the key {key}", HTTPStatus.NOT_FOUND)
    return entry


def _may_see(entry: ChunkKVCache) -> bool:
    """Whether the segment exists for whoever asks: for administrators all do, for others their namespaces'."""
    caller = CALLER.get()
    return caller is None or caller.is_admin or caller.may_use(entry.identity.scope.owner)


def _parse_cursor(cursor: str | None) -> int:
    try:
        return -1 if cursor is None else int(cursor, 16)
    except ValueError as error:
        raise VLLMValidationError("not a next_cursor of this server", parameter="cursor") from error


def _describe(manager: ChunkCacheManager, entry: ChunkKVCache) -> dict[str, Any]:
    return {
        "key": str(entry.key),
        "kind": "system" if entry.is_system else "chunk",
        "namespace": entry.identity.scope.owner,
        "ids": manager.ids.ids(entry.key),
        "tokens": entry.identity.num_tokens,
        "pages": entry.num_pages,
        "bytes": entry.num_pages * manager.config.page_bytes,
        "state": "ready" if entry.state is EntryState.READY else "filling",
        "pinned": entry.pinned,
        "created_at": entry.created_at,
        "last_used_at": entry.last_used_at,
        "expires_at": entry.expires_at,
        "hits": entry.hits,
        "leases": entry.leases,
    }
