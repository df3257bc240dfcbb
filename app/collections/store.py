# SPDX-License-Identifier: Apache-2.0
"""Collections in a folder: a JSON file for each collection and for each of its files.

Records appear whole, by renaming, so servers may share the folder. It holds text alone: KV is in pool and tiers.
"""

import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from cachetools import LRUCache

from app.collections.passages import FileRecord, Passage
from cache.errors import ChunkCacheError

_ABOUT: Final = "collection.json"
_FILES: Final = "files"
_MOST_KEPT: Final = 32
"""Collections whose passages stay in memory."""


class UnknownCollectionError(ChunkCacheError):
    """There is no such collection, or no such file in it."""


class CollectionConflictError(ChunkCacheError):
    """A collection can't be changed as asked."""


class CollectionStorageError(ChunkCacheError):
    """The folder can't be written to; what was stored before is unchanged."""


@dataclass(frozen=True, slots=True)
class About:
    """A collection's choices, made when it begins. Its passages are computed behind ``system``."""

    name: str
    namespace: str
    system: str
    max_tokens: int
    created_at: float


@dataclass(frozen=True, eq=False)
class Corpus:
    """A collection's files at one time, by name. Retrievers may keep an index for as long as it lives."""

    about: About
    files: Mapping[str, FileRecord]

    @cached_property
    def passages(self) -> tuple[Passage, ...]:
        """All passages, by file and place in it."""
        return tuple(passage for name in sorted(self.files) for passage in self.files[name].passages)

    def file(self, name: str) -> FileRecord:
        """A file; raises :class:`UnknownCollectionError`."""
        if (record := self.files.get(name)) is None:
            raise UnknownCollectionError(f"collection {self.about.name!r} has no file {name!r}")
        return record

    def summary(self) -> dict[str, Any]:
        """The JSON form, with numbers of files, passages and tokens."""
        tokens = sum(passage.tokens for passage in self.passages)
        return {**asdict(self.about), "files": len(self.files), "passages": len(self.passages), "tokens": tokens}


_Versions = dict[str, tuple[int, int, int]]
"""Inode, modification time in nanoseconds and length of each record, by its path."""


class Collections:
    """The collections below a folder, which need not exist yet. Methods block, and are thread-safe."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._corpora: LRUCache[Path, tuple[_Versions, Corpus]] = LRUCache(_MOST_KEPT)
        self._lock = threading.Lock()

    def begin(
        self, namespace: str, name: str, system: str | None, max_tokens: int | None, default_tokens: int
    ) -> About:
        """The collection, or a new one, stored with its first file; ``None`` stands for its choice, or the default.

        Raises :class:`CollectionConflictError` for another system prompt or length.
        """
        about = _about(self._folder(namespace, name))
        if about is None:
            return About(name, namespace, system or "", max_tokens or default_tokens, time.time())
        if system is not None and system != about.system:
            raise CollectionConflictError(
                f"collection {name!r} is computed behind another system prompt: delete it first"
            )
        if max_tokens is not None and max_tokens != about.max_tokens:
            raise CollectionConflictError(
                f"collection {name!r} has passages of {about.max_tokens} tokens at most: delete it first"
            )
        return about

    def put(self, about: About, record: FileRecord) -> None:
        """Stores a file's record in place of its earlier one; raises :class:`CollectionStorageError`."""
        folder = self._folder(about.namespace, about.name)
        _write(_path(folder, record.file), record.to_dict())
        if _about(folder) is None:
            _write(folder / _ABOUT, asdict(about))

    def record(self, about: About, file: str) -> FileRecord | None:
        """The record of a file; ``None`` if there is none."""
        return _record(_path(self._folder(about.namespace, about.name), file))

    def corpus(self, namespace: str, name: str) -> Corpus:
        """The collection as it is now; raises :class:`UnknownCollectionError`."""
        folder = self._folder(namespace, name)
        if (about := _about(folder)) is None:
            raise UnknownCollectionError(f"there is no collection {name!r}")
        with self._lock:
            versions = _versions(folder)
            known = self._corpora.get(folder)
            if known is not None and known[0] == versions and known[1].about == about:
                return known[1]
            records = [record for path in versions if (record := _record(Path(path))) is not None]
            corpus = Corpus(about, {record.file: record for record in records})
            self._corpora[folder] = versions, corpus
            return corpus

    def all_of(self, namespace: str) -> list[Corpus]:
        """All collections of a namespace, by name."""
        folder = self._namespace(namespace)
        names = sorted(each.name for each in folder.iterdir()) if folder.is_dir() else []
        return [self.corpus(namespace, name) for name in names if _about(folder / name) is not None]

    def delete_file(self, namespace: str, name: str, file: str) -> None:
        """Removes a file."""
        _path(self._folder(namespace, name), file).unlink(missing_ok=True)

    def delete(self, namespace: str, name: str) -> None:
        """Removes a collection."""
        folder = self._folder(namespace, name)
        (folder / _ABOUT).unlink(missing_ok=True)  # first: without it, the rest is no collection
        shutil.rmtree(folder, ignore_errors=True)

    def _namespace(self, namespace: str) -> Path:
        """Any text may be a namespace, and no two may share a folder."""
        return self.root / sha256(namespace.encode()).hexdigest()[:32]

    def _folder(self, namespace: str, name: str) -> Path:
        return self._namespace(namespace) / name


def _path(folder: Path, file: str) -> Path:
    return folder / _FILES / f"{sha256(file.encode()).hexdigest()[:32]}.json"


def _about(folder: Path) -> About | None:
    fields = _read(folder / _ABOUT)
    return None if fields is None else About(**fields)


def _record(path: Path) -> FileRecord | None:
    fields = _read(path)
    return None if fields is None else FileRecord.of_json(fields)


def _versions(folder: Path) -> _Versions:
    try:
        with os.scandir(folder / _FILES) as entries:
            stats = [(entry.path, entry.stat()) for entry in entries if entry.name.endswith(".json")]
    except FileNotFoundError:
        return {}
    return {path: (stat.st_ino, stat.st_mtime_ns, stat.st_size) for path, stat in sorted(stats)}


def _read(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file; ``None`` if there is no such file."""
    try:
        fields: dict[str, Any] = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    return fields


def _write(path: Path, fields: dict[str, Any]) -> None:
    """Replaces a file atomically."""
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False, encoding="utf-8") as file:
            temporary = Path(file.name)
            json.dump(fields, file, ensure_ascii=False)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        raise CollectionStorageError(f"{path.parent}: {error.strerror or error}") from error
