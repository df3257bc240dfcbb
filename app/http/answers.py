# SPDX-License-Identifier: Apache-2.0
"""Schemas of our endpoints' answers, for the OpenAPI page; tests validate every answer."""

from typing import Literal

from cache.lease import ChunkStatus
from cache.positions.layout import PlacementName, PositionStrategy
from cache.report import ChunkLabel, Decided, FoundDocument, Report, ScopeName, Shape
from engine_ext.wire.vllm_compat import ChatCompletionResponse


class RagChatAnswer(ChatCompletionResponse):
    """A ``chat.completion`` with the cache's report."""

    cache: Report | None


class PlannedChunk(ChunkLabel):
    """``filling``: another request is computing it."""

    key: str
    tokens: int
    status: Literal["hit", "filling", "missing"]


class PlannedTokens(Shape):
    """``missing``: tokens that fill requests would have to save."""

    prompt: int
    cached: int
    missing: int
    question: int


class Pages(Shape):
    """Pages of the chunk pool."""

    needed: int
    free: int


class Plan(Shape):
    """Only ``mode`` and ``reason`` while the cache is off, and for a request without chunks.

    ``prefetching``: number of segments that are on their way, if asked for; ``found``: documents in the messages.
    """

    mode: Literal["chunked", "full"]
    reason: str | None
    position_strategy: PositionStrategy | None = None
    scope: ScopeName | None = None
    decision: Decided | None = None
    recompute: float | None = None
    reread: float | None = None
    tokens: PlannedTokens | None = None
    pages: Pages | None = None
    chunks: list[PlannedChunk] | None = None
    prefetching: int | None = None
    found: list[FoundDocument] | None = None


class Place(Shape):
    """A part of a file: characters of its text, and the page from 1; ``null`` in files without pages."""

    page: int | None
    start: int
    end: int


class SplitChunk(Shape):
    """A chunk as other endpoints take it, plus ``tokens``."""

    id: str
    title: str | None
    text: str
    tokens: int
    metadata: Place


class Split(Shape):
    """A file's chunks, in its order."""

    chunks: list[SplitChunk]


class Progress(Shape):
    """Documents."""

    done: int
    total: int


class IngestedChunk(ChunkLabel):
    """One chunk of ``POST /v1/rag/chunks``."""

    key: str | None
    tokens: int
    status: ChunkStatus | Literal["failed"]
    error: str | None = None
    progress: Progress


class IngestSummary(Shape):
    """Documents, chunks by status, tokens, and chunks that are still cached at the end."""

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


class IngestEnd(Shape):
    """The last line."""

    summary: IngestSummary


class StoredFile(Shape):
    """One file of ``POST /v1/rag/collections/NAME``."""

    file: str
    status: Literal["added", "changed", "unchanged", "failed"]
    passages: int | None = None
    error: str | None = None


class ComputedPassage(IngestedChunk):
    """One passage of a file."""

    file: str


class FilesByStatus(Shape):
    """Numbers of files."""

    added: int
    changed: int
    unchanged: int
    failed: int


class CollectionSummary(IngestSummary):
    """Files, then passages as in ``POST /v1/rag/chunks``. ``displaced``: chunks evicted from the pool meanwhile.

    ``search``: why passages are not found as the server's retriever finds them.
    """

    files: FilesByStatus
    displaced: int
    search: str | None = None


class CollectionEnd(Shape):
    """The last line."""

    summary: CollectionSummary


class CollectionAbout(Shape):
    """A collection, with numbers of files, passages and tokens. ``max_tokens``: the most of a passage."""

    name: str
    namespace: str
    system: str
    max_tokens: int
    context_tokens: int = 0
    created_at: float
    files: int
    passages: int
    tokens: int


class CollectionList(Shape):
    """The collections of one namespace."""

    object: Literal["list"]
    data: list[CollectionAbout]


class KeptFile(Shape):
    """A file of a collection."""

    file: str
    bytes: int
    passages: int


class Collection(CollectionAbout):
    """A collection and its files."""

    data: list[KeptFile]


class KeptPassage(Place):
    """A passage of a file."""

    id: str
    file: str
    number: int
    title: str | None
    text: str
    tokens: int
    context: int


class PassageList(Shape):
    """The passages of a file, in its order."""

    object: Literal["list"]
    data: list[KeptPassage]


class CollectionDeleted(Shape):
    """Number of passages that are gone."""

    collection: str
    file: str | None
    passages: int
    deleted: Literal[True]


class CachedSegment(Shape):
    """One segment in the pool, or in tiers only (``stored``)."""

    key: str
    kind: Literal["chunk", "system"]
    namespace: str
    ids: list[str]
    tokens: int
    pages: int
    bytes: int
    state: Literal["ready", "filling", "stored"]
    tiers: list[str]
    pinned: bool
    created_at: float
    last_used_at: float
    expires_at: float | None
    hits: int
    leases: int


class SegmentList(Shape):
    """One page."""

    object: Literal["list"]
    data: list[CachedSegment]
    next_cursor: str | None


class Deleted(Shape):
    """The key of the dropped segment."""

    key: str
    deleted: Literal[True]


class CacheStats(Shape):
    """Only ``enabled`` and ``reason`` while the cache is off. Counters count since the start."""

    enabled: bool
    reason: str | None
    placement: PlacementName | None = None
    measures_attention: bool | None = None
    decode_budget: int | None = None
    position_strategy: PositionStrategy | None = None
    occupancy: dict[str, int] | None = None
    tiers: dict[str, dict[str, int]] | None = None
    counters: dict[str, int | dict[str, int] | dict[str, dict[str, int]]] | None = None


class Cleared(Shape):
    """Number of dropped segments."""

    cleared: int


class Slept(Shape):
    """Segments and pages taken out of the pool."""

    segments: int
    pages: int


class RegistryState(Shape):
    """Whether the registry is reachable, and its number of invalid entries."""

    up: bool
    invalid_entries: int


class ReplicaState(Shape):
    """A replica as its heartbeat describes it."""

    id: str
    name: str
    url: str
    models: list[str]
    fingerprint: str
    load: int
    held_tokens: int
    capacity_tokens: int
    role: str


class Cluster(Shape):
    """The replicas in the registry."""

    registry: RegistryState
    replicas: list[ReplicaState]
