# SPDX-License-Identifier: Apache-2.0
"""Files into a collection: split, stored as passages, and computed ahead."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from hashlib import sha256
from pathlib import PurePath
from typing import Any, Final, NamedTuple

from starlette.datastructures import State

from app.catalog.ingestion import Lines, ingestion_of
from app.catalog.segments import Catalog
from app.collections.passages import FileRecord, dropped_ids, split_into_passages
from app.collections.store import About, Collections
from app.documents.files import SUFFIXES, UnreadableFileError, text_of
from app.documents.rag_request import IngestRequest, RagChunk
from cache.eviction.removal import Removal
from cache.manager import ChunkCacheManager
from engine_ext.client.engine import ChunkEngine
from engine_ext.wire.vllm_compat import ErrorResponse

_READING: Final = asyncio.Semaphore(2)
"""Files read concurrently; others wait."""
_STATUSES: Final = ("added", "changed", "unchanged", "failed")


class GivenFile(NamedTuple):
    """A file as a client sent it. ``name`` may have folders."""

    name: str
    content: bytes


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
    """Stores the files of one call in a collection, then computes their passages."""

    def __init__(self, state: State, manager: ChunkCacheManager, collections: Collections, about: About) -> None:
        self._state = state
        self._engine: ChunkEngine = state.engine_client
        self._manager = manager
        self._collections = collections
        self._about = about

    async def store(self, files: Sequence[GivenFile]) -> list[FileResult]:
        """Stores the files that have changed. Raises :class:`CollectionStorageError`."""
        return [await self._stored(file) for file in files]

    async def compute(self, results: Sequence[FileResult]) -> Lines | ErrorResponse:
        """Computes the passages of stored files. Yields a line per file, one per passage, and the summary."""
        passages = [passage for result in results if result.record for passage in result.record.passages]
        chunks = [RagChunk(id=each.id, text=each.text, title=each.title) for each in passages]
        request = IngestRequest.model_validate(
            {"system": self._about.system, "chunks": chunks, "cache": {"namespace": self._about.namespace}}
        )
        lines = await ingestion_of(request, self._state, self._manager)
        if isinstance(lines, ErrorResponse):
            return lines
        return self._with_files(results, [passage.file for passage in passages], lines)

    async def drop(self, ids: Sequence[str]) -> None:
        """Drops the KV of passages that a collection no longer has."""
        namespace = self._about.namespace
        known = await self._engine.cache.known_ids(namespace, list(ids))
        if known is not None and (keys := Catalog(self._manager, None).drop_ids(namespace, ids)):
            await self._engine.cache.drop_from_tiers(keys, namespace)

    async def _stored(self, file: GivenFile) -> FileResult:
        digest = sha256(file.content).hexdigest()
        before = await asyncio.to_thread(self._collections.record, self._about, file.name)
        if before is not None and before.is_of(digest, self._about.max_tokens):
            return FileResult(file.name, "unchanged", before)
        try:
            async with _READING:
                text = await _text(file)
                record = await asyncio.to_thread(self._split, file, digest, text)
        except UnreadableFileError as error:
            return FileResult(file.name, "failed", None, str(error))
        await asyncio.to_thread(self._collections.put, self._about, record)
        await self.drop(dropped_ids(before, record))
        return FileResult(file.name, "added" if before is None else "changed", record)

    def _split(self, file: GivenFile, digest: str, text: str) -> FileRecord:
        most, count = self._about.max_tokens, self._engine.renderer.num_tokens
        passages = split_into_passages(text, file.name, most, count, collection=self._about.name)
        if not passages:
            raise UnreadableFileError("there is no text in the file")
        return FileRecord(file.name, digest, len(file.content), most, passages)

    async def _with_files(self, results: Sequence[FileResult], files: Sequence[str], lines: Lines) -> Lines:
        """The lines of a call; ``files`` has the file of each passage."""
        statuses = Counter(result.status for result in results)
        removals = self._manager.metrics.removals
        evicted_before = removals[Removal.EVICTED]
        for result in results:
            yield result.to_dict()
        async for line in lines:
            if (summary := line.get("summary")) is not None:
                by_status = {name: statuses[name] for name in _STATUSES}
                displaced = removals[Removal.EVICTED] - evicted_before
                yield {"summary": {"files": by_status, **summary, "displaced": displaced}}
            else:
                yield {"file": files[line["index"]], **line}


async def _text(file: GivenFile) -> str:
    suffix = PurePath(file.name).suffix.lower()
    if suffix not in SUFFIXES:
        raise UnreadableFileError(f"its type is not one of {', '.join(SUFFIXES)}")
    return await text_of(file.content, suffix)
