# SPDX-License-Identifier: Apache-2.0
"""Files into a collection: split, stored as passages, and computed ahead, one file after the other."""

import logging
import unicodedata
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from hashlib import sha256
from typing import Any, Final, NamedTuple

from pydantic import ValidationError
from starlette.datastructures import State, UploadFile
from vllm.exceptions import VLLMValidationError

from app.access.limits import LIMITS
from app.catalog.ingestion import check_ids, ingestion_of
from app.catalog.segments import Catalog
from app.collections.passages import LONGEST_NAME, FileRecord, Passage, dropped_ids, passages_of
from app.collections.store import About, Collections
from app.documents.document import BadRequestError
from app.documents.extraction import Extraction
from app.documents.rag_request import IngestRequest, RagChunk, documents_of
from app.documents.readers import UnreadableFileError
from cache.errors import ChunkCacheError
from cache.eviction.removal import Removal
from cache.manager import ChunkCacheManager
from engine_ext.client.engine import ChunkEngine
from engine_ext.client.processes import StoppedError
from engine_ext.client.threads import in_thread
from engine_ext.wire.vllm_compat import ErrorResponse

logger = logging.getLogger(__name__)
_STATUSES: Final = ("added", "changed", "unchanged", "failed")
_BATCH: Final = 256
"""Passages that are handed to the engine at once: more would hold the event loop."""


class IngestionRefusedError(Exception):
    """vLLM refuses the collection's system prompt, and so all passages."""

    def __init__(self, response: ErrorResponse) -> None:
        super().__init__(response.error.message)
        self.response = response


class FileResult(NamedTuple):
    """The outcome for one file. ``error`` says why it ``failed``; ``record`` is then ``None``."""

    file: str
    status: str
    record: FileRecord | None
    error: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        passages = {"passages": len(self.record.passages)} if self.record else {}
        return {"file": self.file, "status": self.status, **passages, **({"error": self.error} if self.error else {})}


class CollectionIngestion:
    """Stores files in a collection, and computes their passages."""

    def __init__(self, state: State, manager: ChunkCacheManager, collections: Collections, about: About) -> None:
        self._state = state
        self._engine: ChunkEngine = state.engine_client
        self._extraction: Extraction = state.tessera.extraction
        self._manager = manager
        self._collections = collections
        self._about = about
        self._statuses: Counter[str] = Counter()
        self._totals: Counter[str] = Counter()
        self._num_passages = 0

    async def run(self, files: Sequence[UploadFile]) -> AsyncIterator[dict[str, Any]]:
        """Yields a line per file, with a line per passage behind it, then the summary.

        A file that fails changes nothing. If no file can be read, raises :class:`BadRequestError`,
        :class:`StoppedError`, or the :class:`ChunkCacheError` of storing one, and before it yields anything
        :class:`IngestionRefusedError`.
        """
        evicted_before = self._manager.metrics.removals[Removal.EVICTED]
        failed: list[FileResult] = []
        refusal: BadRequestError | ChunkCacheError | StoppedError | None = None
        for file in files:
            try:
                result = await self._stored(file)
            except IngestionRefusedError:
                raise
            except (BadRequestError, ChunkCacheError, StoppedError) as error:
                result, refusal = FileResult(file.filename or "", "failed", None, str(error)), error
            except Exception as error:  # of one file, whatever it is
                logger.exception("Storing %r failed.", file.filename)
                result = FileResult(file.filename or "", "failed", None, f"{type(error).__name__}: {error}")
            self._statuses[result.status] += 1
            if result.record is None and self._statuses.total() == self._statuses["failed"]:
                failed.append(result)
                continue
            lines = self._computed(result.record) if result.record else _nothing()
            try:
                first = await anext(lines, None)
            except ChunkCacheError as error:  # what was registered meanwhile, or is left of an earlier process
                first, result = None, result._replace(error=f"its passages weren't computed: {error}")
            for each in (*failed, result):
                yield each.to_dict()
            failed.clear()
            if first is not None:
                yield first
            async for line in lines:
                yield line
        if failed:
            if refusal is not None:
                raise refusal
            raise BadRequestError("; ".join(f"{each.file}: {each.error}" for each in failed), "files")
        displaced = self._manager.metrics.removals[Removal.EVICTED] - evicted_before
        by_status = {name: self._statuses[name] for name in _STATUSES}
        yield {"summary": {"files": by_status, **self._totals, "displaced": displaced}}

    async def drop(self, ids: Sequence[str]) -> None:
        """Drops the KV of passages that a collection no longer has."""
        namespace = self._about.namespace
        known = await self._engine.cache.known_ids(namespace, list(ids))
        if known is not None and (keys := Catalog(self._manager, None).drop_ids(namespace, ids)):
            await self._engine.cache.drop_from_tiers(keys, namespace)

    async def _stored(self, file: UploadFile) -> FileResult:
        name = file.filename or ""
        if not 1 <= len(name) <= LONGEST_NAME or any(unicodedata.category(each) in ("Cc", "Cs") for each in name):
            words = f"a file needs a name of 1 to {LONGEST_NAME} characters, none of them control characters"
            return FileResult(name, "failed", None, words)
        content = await file.read()
        most = self._about.max_tokens
        digest = await in_thread(lambda: sha256(content).hexdigest())
        before = await in_thread(self._collections.record, self._about, name)
        if before is not None and before.is_of(digest, most):
            return FileResult(name, "unchanged", before)
        try:
            pieces = await self._extraction.split(content, name, most)
        except UnreadableFileError as error:
            return FileResult(name, "failed", None, str(error))
        choices = name, self._about.name, self._about.context_tokens
        passages = await in_thread(passages_of, pieces, *choices)
        record = FileRecord(name, digest, len(content), most, passages)
        await self._check(record)
        limits = LIMITS.get()
        most_bytes = limits.collections_size if limits is not None else None
        await in_thread(self._collections.put, self._about, record, most_bytes)
        await self.drop(dropped_ids(before, record))
        return FileResult(name, "added" if before is None else "changed", record)

    async def _check(self, record: FileRecord) -> None:
        """Raises, before anything is stored, what its passages would raise that are computed, or asked about.

        These are :class:`IngestionRefusedError`, :class:`BadRequestError` and :class:`IdConflictError`.
        """
        passages = record.passages
        for start in range(0, len(passages), _BATCH):
            request = await in_thread(self._request, record, passages[start : start + _BATCH])
            if start == 0:  # the system prompt is the same for all
                await self._lines(request.model_copy(update={"chunks": [passages[0].text]}))
            check_ids(self._manager.ids, self._about.namespace, documents_of(request.chunks, None, ""))

    def _request(self, record: FileRecord, passages: Sequence[Passage]) -> IngestRequest:
        """Raises :class:`BadRequestError`."""
        try:
            chunks = [
                RagChunk(id=each.id, text=each.text, title=each.title, context=record.context_of(each))
                for each in passages
            ]
            return IngestRequest.model_validate(
                {"system": self._about.system, "chunks": chunks, "cache": {"namespace": self._about.namespace}}
            )
        except ValidationError as error:
            raise BadRequestError(error.errors()[0]["msg"], "files") from error

    async def _lines(self, request: IngestRequest) -> AsyncIterator[dict[str, Any]]:
        """Raises :class:`IngestionRefusedError`, :class:`BadRequestError`."""
        try:
            lines = await ingestion_of(request, self._state, self._manager)
        except VLLMValidationError as error:
            raise BadRequestError(error.args[0], error.parameter or "files") from error
        if isinstance(lines, ErrorResponse):
            raise IngestionRefusedError(lines)
        return lines

    async def _computed(self, record: FileRecord) -> AsyncIterator[dict[str, Any]]:
        """Computes a file's passages; yields a line for each. Raises :class:`IngestionRefusedError`."""
        passages = record.passages
        for start in range(0, len(passages), _BATCH):
            batch = passages[start : start + _BATCH]
            request = await in_thread(self._request, record, batch)
            async for line in await self._lines(request):
                if (summary := line.get("summary")) is not None:
                    self._totals.update(summary)
                    continue
                progress = {"done": start + line["progress"]["done"], "total": len(passages)}
                index = self._num_passages + line["index"]
                yield {"file": passages[0].file, **line, "index": index, "progress": progress}
            self._num_passages += len(batch)


async def _nothing() -> AsyncIterator[dict[str, Any]]:
    return
    yield
