# SPDX-License-Identifier: Apache-2.0
"""Computes chunks ahead of time, pins and names them."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, Final

from starlette.datastructures import State

from app.access.limits import LIMITS
from app.context import ServerContext
from app.documents.document import Document
from app.documents.openai_documents import DocumentsRequest
from app.documents.rag_request import IngestRequest, chat_completion
from app.intake import render, take_in
from app.prompt.marks import Marks
from app.prompt.segments import SegmentRenderer
from cache.manager import ChunkCacheManager
from cache.positions.layout import Chunk
from cache.segments.chunk_ids import ChunkIds, IdConflictError, RegisteredText
from cache.segments.hashing import ChunkHash
from cache.segments.holdings import DocumentKey
from cache.segments.index import ChunkKVCache
from engine_ext.client.background import BUSY_ROUND_TOKENS, BackgroundFills, Ingested, Ingestion
from engine_ext.client.engine import ChunkEngine
from engine_ext.client.request import ResolvedRequest, Ticket
from engine_ext.client.threads import in_thread
from engine_ext.wire.vllm_compat import ErrorResponse
from replicas.document_keys import id_key

Lines = AsyncIterator[dict[str, Any]]

_LONGEST_WAIT_S: Final = 0.25
"""For tokens, before another look at whether the server stops."""


class Keeper:
    """Pins the chunks of one call, sets their time to live, and registers their ids."""

    def __init__(
        self,
        manager: ChunkCacheManager,
        namespace: str,
        documents: Sequence[Document],
        document_keys: Sequence[DocumentKey],
        *,
        pinned: bool,
        ttl_s: float | None,
    ) -> None:
        """``document_keys`` name the documents in the registry, if there is one. Raises :class:`IdConflictError`."""
        self.namespace = namespace
        self.documents = documents
        self._manager = manager
        self._document_keys = document_keys
        self._pinned = pinned
        self._expires_at = None if ttl_s is None else manager.clock() + ttl_s
        check_ids(manager.ids, namespace, documents)

    def keep(self, chunk: Chunk, entry: ChunkKVCache) -> None:
        """Keeps a chunk whose ``entry`` can be loaded.

        Raises :class:`CapacityError` if it can't be pinned, and :class:`IdConflictError`.
        """
        document = self.documents[chunk.document]
        content = _content(document)
        if self._document_keys:
            self._manager.name(self._document_keys[chunk.document], entry)
        if chunk.id is not None:
            # Another call may have given the id another text meanwhile: then this call's text must not be pinned.
            self._manager.ids.check(self.namespace, chunk.id, content)
        self._manager.retain(entry, pinned=self._pinned, expires_at=self._expires_at)
        if chunk.id is not None:
            self._manager.ids.register(self.namespace, chunk.id, content, entry.key)
            self._manager.name(id_key(self.namespace, chunk.id), entry)

    def num_cached(self, keys: set[str]) -> int:
        """How many of the segments with these keys are cached now."""
        find = self._manager.index.by_key
        return sum(find(ChunkHash(bytes.fromhex(key))) is not None for key in keys)


def check_ids(ids: ChunkIds, namespace: str, documents: Sequence[Document]) -> None:
    """Refuses an id with two texts, in this call or registered before; raises :class:`IdConflictError`."""
    given: dict[str, RegisteredText] = {}
    for document in documents:
        if document.id is None:
            continue
        content = _content(document)
        if given.setdefault(document.id, content) != content:
            raise IdConflictError(f"chunk id {document.id!r} is given with two texts")
        ids.check(namespace, document.id, content)


def _content(document: Document) -> RegisteredText:
    """The content that the document's id stands for."""
    return RegisteredText(document.text, document.title, document.context)


async def ingestion_of(request: IngestRequest, state: State, manager: ChunkCacheManager) -> Lines | ErrorResponse:
    """Prepares to compute a request's chunks; iterating computes them.

    Yields a line per finished chunk, then the summary. Raises :class:`BadRequestError` and :class:`IdConflictError`.
    """
    engine: ChunkEngine = state.engine_client
    context: ServerContext = state.tessera
    taken, ticket = await take_in(context, request)
    engine.renderer.check_documents(taken.documents)
    rendered = await _frame(taken, ticket, context.marks, state)
    if isinstance(rendered, ErrorResponse):
        return rendered
    namespace = rendered.scope.namespace
    keeper = Keeper(manager, namespace, taken.documents, ticket.document_keys, pinned=request.pin, ttl_s=request.ttl_s)
    return ingested(engine.background, engine.renderer, rendered, keeper)


async def _frame(
    taken: DocumentsRequest, ticket: Ticket, marks: Marks, state: State
) -> ResolvedRequest | ErrorResponse:
    """Renders the request with one placeholder for its chunks. Together they may be too long for a prompt."""
    with marks.issue(Ticket(ticket.options, (None,)), [Document("-")]) as marked:
        taken.insert(marked)
        return await render(state, chat_completion(taken.body), for_run=False)


async def ingested(
    background: BackgroundFills, renderer: SegmentRenderer, rendered: ResolvedRequest, keeper: Keeper
) -> AsyncIterator[dict[str, Any]]:
    """Computes the keeper's documents behind the prefix of ``rendered``. Yields a line per chunk, then the summary."""
    started = time.monotonic()
    chunks = await in_thread(_chunks, renderer, keeper.documents, keeper.namespace)
    ingestion = Ingestion(rendered, keeper.keep)
    tally = _Tally(len(keeper.documents))
    async for result in _within_limits(background, ingestion, chunks):
        yield tally.line(result)
    summary = tally.summary(keeper.num_cached(tally.keys))
    yield {"summary": {**summary, "seconds": round(time.monotonic() - started, 3)}}


async def _within_limits(
    background: BackgroundFills, ingestion: Ingestion, chunks: list[Chunk]
) -> AsyncIterator[Ingested]:
    """Yield the results of chunks, each charged to its tenant as a prompt is, at the pace of its tokens per minute."""
    limits = LIMITS.get()
    if limits is None:
        async for result in background.run(ingestion, chunks):
            yield result
        return
    assert ingestion.frame.prompt is not None
    num_before = len(ingestion.frame.prompt.chunk_prefix)
    for part in _parts(chunks):
        while not background.is_stopping and (wait := limits.wait_s()) > 0:
            await asyncio.sleep(min(wait, _LONGEST_WAIT_S))
        limits.charge(num_before + sum(chunk.num_with_context for chunk in part))
        num_before = 0
        async for result in background.run(ingestion, part):
            yield result


def _parts(chunks: list[Chunk]) -> Iterator[list[Chunk]]:
    """The chunks, in parts of about one round of work."""
    part, num_tokens = list[Chunk](), 0
    for chunk in chunks:
        part.append(chunk)
        if (num_tokens := num_tokens + chunk.num_with_context) >= BUSY_ROUND_TOKENS:
            yield part
            part, num_tokens = [], 0
    if part:
        yield part


class _Tally:
    """Counts the results of one call."""

    def __init__(self, num_documents: int) -> None:
        self.keys: set[str] = set()
        self._num_documents = num_documents
        self._num_done = 0
        self._num_tokens = 0
        self._statuses: Counter[str] = Counter()

    def line(self, result: Ingested) -> dict[str, Any]:
        """Counts one chunk; returns its JSON, with progress."""
        chunk, status = result.chunk, result.status or "failed"
        self._statuses[status] += 1
        self._num_done += chunk.part is None or chunk.part[0] == chunk.part[1]
        if result.status is not None and result.key is not None:
            self.keys.add(result.key)
            self._num_tokens += chunk.num_tokens
        return {
            **chunk.label,
            "key": result.key,
            "tokens": chunk.num_tokens,
            "status": status,
            **({"error": result.error} if result.error else {}),
            "progress": {"done": self._num_done, "total": self._num_documents},
        }

    def summary(self, num_cached: int) -> dict[str, Any]:
        """Totals of the call. ``num_cached``: how many of its segments are still cached."""
        return {
            "documents": self._num_documents,
            **{name: self._statuses[name] for name in ("hit", "loaded", "filled", "waited", "failed")},
            "tokens": self._num_tokens,
            "cached": num_cached,
            "evicted": len(self.keys) - num_cached,
        }


def _chunks(renderer: SegmentRenderer, documents: Sequence[Document], namespace: str) -> list[Chunk]:
    return [chunk for i, document in enumerate(documents) for chunk in renderer.chunks(document, i, namespace)]
