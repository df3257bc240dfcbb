# SPDX-License-Identifier: Apache-2.0
"""The shapes of our endpoints' answers, for the OpenAPI page; tests hold every answer against them."""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Literal

from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict

from app.http.refusals import Reason
from cache.lease import ChunkStatus
from cache.positions.layout import PositionStrategy
from engine_ext.wire.request import LinkContext, PlacementName, ScopeName
from engine_ext.wire.vllm_compat import ChatCompletionResponse

OUR_TAGS = frozenset({"RAG", "Chunks", "Chunk cache", "Cluster"})
EVENT_STREAM: Mapping[str, Any] = {"text/event-stream": {"schema": {"type": "string"}}}


class JsonLines(StreamingResponse):
    """One JSON object per line."""

    media_type = "application/x-ndjson"


class _Shape(BaseModel):
    """Fields that are not named here don't occur."""

    model_config = ConfigDict(extra="forbid")


class Part(_Shape):
    """Which part of a long document a chunk is."""

    number: int
    of: int


class _Chunk(_Shape):
    """``index`` and ``id`` are the document's in the request; ``part`` is there if it became several chunks."""

    index: int
    id: str | None
    part: Part | None = None
    tokens: int


class ReportedChunk(_Chunk):
    """``key`` and ``status`` are ``null`` in full attention. ``origin``: replica or tier; ``why`` it was computed."""

    key: str | None
    status: ChunkStatus | None
    origin: str | None = None
    why: str | None = None


class ReportedTokens(_Shape):
    """Prompt tokens; ``reused + computed == prompt``."""

    prompt: int
    reused: int
    computed: int
    fill_computed: int


class Segment(_Shape):
    """With ``cache.explain`` only; ``position`` is the logical one of the first token."""

    kind: Literal["system", "chunk", "question"]
    token_ids: list[int]
    position: int


class Decided(_Shape):
    """The mode that the server's profile has for such a request, and why."""

    mode: str
    why: str


class Links(_Shape):
    """First tokens of each chunk but the first, computed anew, and how they saw earlier chunks."""

    tokens: int
    context: LinkContext


class ComparedTimes(_Shape):
    """Milliseconds of both answers."""

    cached: dict[str, float]
    full: dict[str, float]


class Compared(_Shape):
    """Full attention beside the answer. ``mean_kl``: nats a token of the answer, over ``top_logprobs`` tokens each."""

    answer: str
    same_tokens: bool
    mean_kl: float
    tokens: int
    top_logprobs: int
    timings_ms: ComparedTimes


class Report(_Shape):
    """What was reused, what was computed, and why."""

    mode: Literal["chunked", "full"]
    reason: str | None
    position_strategy: PositionStrategy
    scope: ScopeName
    tokens: ReportedTokens
    chunks: list[ReportedChunk]
    decision: Decided | None = None
    placement: Literal["in-place"] | None = None
    links: Links | None = None
    compare: Compared | None = None
    timings_ms: dict[str, float]
    segments: list[Segment] | None = None
    opening: list[int] | None = None


class RagChatAnswer(ChatCompletionResponse):
    """A ``chat.completion`` with the cache's report."""

    cache: Report | None


class PlannedChunk(_Chunk):
    """``filling``: another request computes it now."""

    key: str
    status: Literal["hit", "filling", "missing"]


class PlannedTokens(_Shape):
    """``missing`` is what fill requests would have to save."""

    prompt: int
    cached: int
    missing: int
    question: int


class Pages(_Shape):
    """Of the chunk pool."""

    needed: int
    free: int


class Plan(_Shape):
    """Only ``mode`` and ``reason`` while the cache is off, and for a request without chunks."""

    mode: Literal["chunked", "full"]
    reason: str | None
    position_strategy: PositionStrategy | None = None
    scope: ScopeName | None = None
    decision: Decided | None = None
    link_tokens: int | None = None
    tokens: PlannedTokens | None = None
    pages: Pages | None = None
    chunks: list[PlannedChunk] | None = None


class SplitChunk(_Shape):
    """A chunk as other endpoints take it, but for ``tokens``."""

    id: str
    title: str | None
    text: str
    tokens: int


class Split(_Shape):
    """A file's chunks, in its order."""

    chunks: list[SplitChunk]


class Progress(_Shape):
    """Documents."""

    done: int
    total: int


class IngestedChunk(_Chunk):
    """One chunk of ``POST /v1/rag/chunks``."""

    key: str | None
    status: ChunkStatus | Literal["failed"]
    error: str | None = None
    progress: Progress


class IngestSummary(_Shape):
    """Documents, chunks by what became of them, tokens, and the chunks that are cached, or gone again, at the end."""

    documents: int
    hit: int
    loaded: int
    filled: int
    waited: int
    failed: int
    tokens: int
    cached: int
    evicted: int
    seconds: float


class IngestEnd(_Shape):
    """The last line."""

    summary: IngestSummary


class CachedSegment(_Shape):
    """One segment in the pool."""

    key: str
    kind: Literal["chunk", "system"]
    namespace: str
    ids: list[str]
    tokens: int
    pages: int
    bytes: int
    state: Literal["ready", "filling"]
    pinned: bool
    created_at: float
    last_used_at: float
    expires_at: float | None
    hits: int
    leases: int


class SegmentList(_Shape):
    """One page."""

    object: Literal["list"]
    data: list[CachedSegment]
    next_cursor: str | None


class Deleted(_Shape):
    """The key that is found no more."""

    key: str
    deleted: Literal[True]


class CacheStats(_Shape):
    """Only ``enabled`` and ``reason`` while the cache is off. Counters count since the start."""

    enabled: bool
    reason: str | None
    placement: PlacementName | None = None
    position_strategy: PositionStrategy | None = None
    occupancy: dict[str, int] | None = None
    tiers: dict[str, dict[str, int]] | None = None
    counters: dict[str, int | dict[str, int] | dict[str, dict[str, int]]] | None = None


class Cleared(_Shape):
    """Segments that were dropped."""

    cleared: int


class Slept(_Shape):
    """What was taken out of the pool."""

    segments: int
    pages: int


class RegistryState(_Shape):
    """Whether it is reached, and entries in it that no replica wrote."""

    up: bool
    invalid_entries: int


class ReplicaState(_Shape):
    """A replica as its heartbeat describes it."""

    id: str
    name: str
    url: str
    models: list[str]
    fingerprint: str
    load: int
    held_tokens: int
    capacity_tokens: int


class Cluster(_Shape):
    """What the registry knows."""

    registry: RegistryState
    replicas: list[ReplicaState]


class RefusalDetail(_Shape):
    """OpenAI's error object. ``message`` is for people, ``reason`` for programs; ``param`` is the field at fault."""

    message: str
    type: str
    param: str | None
    code: int
    reason: Reason


class Refusal(_Shape):
    """A request that was not served."""

    error: RefusalDetail


_DESCRIPTIONS = {
    HTTPStatus.BAD_REQUEST: "The request can't be served as sent; `error.param` names the field at fault.",
    HTTPStatus.UNAUTHORIZED: "No API key that is known came, and the server asks for one.",
    HTTPStatus.FORBIDDEN: "The key's tenant has not the role that this needs.",
    HTTPStatus.NOT_FOUND: "There is no such model, chunk or registry.",
    HTTPStatus.REQUEST_TIMEOUT: "The body did not come in time.",
    HTTPStatus.CONFLICT: "It does not go with the state of the cache, which `error.message` tells.",
    HTTPStatus.GONE: "The chunk of an id is no longer cached: send its text again.",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "The body, or the file, is too large.",
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE: "No such file can be split.",
    HTTPStatus.TOO_MANY_REQUESTS: "The tenant's limits are used up; `Retry-After` says when to ask.",
    HTTPStatus.NOT_IMPLEMENTED: "The model, or the server as it is configured, can't do this.",
    HTTPStatus.SERVICE_UNAVAILABLE: "Not now: the queue is full, or the server stops; `Retry-After` says when to ask.",
}
_EVERYWHERE = (
    HTTPStatus.BAD_REQUEST,
    HTTPStatus.UNAUTHORIZED,
    HTTPStatus.FORBIDDEN,
    HTTPStatus.REQUEST_TIMEOUT,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    HTTPStatus.TOO_MANY_REQUESTS,
)
_COMPONENTS = "#/components/schemas/"
_REFUSAL = {"application/json": {"schema": {"$ref": f"{_COMPONENTS}{Refusal.__name__}"}}}


def answers(shape: Any, *errors: HTTPStatus, **success: Any) -> dict[int | str, dict[str, Any]]:
    """``responses`` of an endpoint: its answer's shape, and what it may be refused with besides what all may be.

    ``success`` is more about the answer (``content``, ``links``).
    """
    found: dict[int | str, dict[str, Any]] = {200: {"model": shape, **success}}
    for status in sorted({*_EVERYWHERE, *errors}):
        found[int(status)] = {"description": _DESCRIPTIONS[status], "content": _REFUSAL}
    return found


def correct_openapi(app: FastAPI) -> None:
    """Puts the shape of refusals on the OpenAPI page, and takes status 422 from our endpoints.

    FastAPI adds that one everywhere; vLLM's handlers make it 400.
    """
    make = app.openapi

    def corrected() -> dict[str, Any]:
        page = make()
        refusal = Refusal.model_json_schema(ref_template=_COMPONENTS + "{model}")
        page["components"]["schemas"] |= {**refusal.pop("$defs"), Refusal.__name__: refusal}
        for operations in page["paths"].values():
            for operation in operations.values():
                if OUR_TAGS.intersection(operation.get("tags", ())):
                    operation["responses"].pop("422", None)
        return page

    app.openapi = corrected  # type: ignore[method-assign]
