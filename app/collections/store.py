# SPDX-License-Identifier: Apache-2.0
"""Collections in a folder: a SQLite database for each, so that servers may share the folder and be killed at any time.

A database holds text and vectors; KV is in pool and tiers. Why SQLite, and how: docs/decisions/0029.
"""

import json
import logging
import os
import re
import sqlite3
import tempfile
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, Literal
from weakref import WeakValueDictionary

from cachetools import LRUCache
from xxhash import xxh3_128_hexdigest

from app.collections.passages import FileRecord, Passage
from app.documents.retrieve_field import COLLECTION_NAME
from cache.errors import ChunkCacheError
from machine.folders import is_on_network

logger = logging.getLogger(__name__)
_SUFFIX: Final = ".sqlite3"
_DAMAGED: Final = ".damaged-"
_MOST_KEPT: Final = 32
"""Collections whose passages stay in memory."""
_BUSY_S: Final = 30.0
"""How long a writer waits for others."""
_EMPTY_BYTES: Final = 1 << 15
"""Of a database without a file, at most."""
_VERSION: Final = 1
_UNREADABLE: Final = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_SCHEMA: Final = f"""
PRAGMA auto_vacuum = FULL;
CREATE TABLE state (revision INTEGER NOT NULL, deleted_at REAL NOT NULL);
INSERT INTO state VALUES (0, 0);
CREATE TABLE about (fields TEXT NOT NULL);
CREATE TABLE files (
    id INTEGER PRIMARY KEY, file TEXT NOT NULL UNIQUE, revision INTEGER NOT NULL, bytes INTEGER NOT NULL,
    fields TEXT NOT NULL
);
CREATE INDEX files_by_revision ON files (revision);
CREATE TABLE passages (
    file_id INTEGER NOT NULL REFERENCES files ON DELETE CASCADE, number INTEGER NOT NULL, id TEXT NOT NULL,
    tokens INTEGER NOT NULL, digest TEXT NOT NULL, fields TEXT NOT NULL, PRIMARY KEY (file_id, number)
) WITHOUT ROWID;
CREATE INDEX passages_by_digest ON passages (digest);
CREATE TABLE vectors (
    digest TEXT NOT NULL, model TEXT NOT NULL, vector BLOB NOT NULL, PRIMARY KEY (digest, model)
) WITHOUT ROWID;
PRAGMA user_version = {_VERSION};
"""


class UnknownCollectionError(ChunkCacheError):
    """There is no such collection, or no such file in it."""


class CollectionConflictError(ChunkCacheError):
    """A collection can't be changed as asked."""


class CollectionStorageError(ChunkCacheError):
    """The folder can't be read or written to; what was stored before is unchanged."""


class CollectionQuotaError(CollectionStorageError):
    """A namespace's collections would take more bytes than they may."""


class DamagedCollectionError(CollectionStorageError):
    """A collection's database could not be read, and was set aside: its files can be ingested anew."""


class _UnreadableError(sqlite3.DatabaseError):
    """A database has no collection that this version can read."""


@dataclass(frozen=True, slots=True)
class About:
    """A collection's choices, made when it begins.

    Its passages are computed behind ``system``, and behind up to ``context_tokens`` tokens before them in their file.
    """

    name: str
    namespace: str
    system: str
    max_tokens: int
    created_at: float
    context_tokens: int = 0


@dataclass(frozen=True, eq=False)
class Corpus:
    """A collection's files at one time, by name. Retrievers may keep an index for as long as it lives."""

    about: About
    files: Mapping[str, FileRecord]
    vectors: "Vectors | None" = None
    """``None`` for a corpus without a database."""

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


def digest_of(passage: Passage) -> str:
    """Names a passage's text and title: what its vectors depend on."""
    return xxh3_128_hexdigest(passage.document.render().encode())


class _Kept:
    """The last corpus of a collection, and the revision that it was read at."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.revision = -1
        self.corpus: Corpus | None = None


class Collections:
    """The collections below a folder, which need not exist yet. Methods block, and are thread-safe.

    All raise :class:`CollectionStorageError`.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._kept: LRUCache[Path, _Kept] = LRUCache(_MOST_KEPT)
        self._lock = threading.Lock()
        self._writing: WeakValueDictionary[Path, threading.Lock] = WeakValueDictionary()
        """Of namespaces with a quota: one file at a time is measured and stored."""

    def begin(
        self,
        namespace: str,
        name: str,
        system: str | None,
        max_tokens: int | None,
        default_tokens: int,
        context_tokens: int | None = None,
    ) -> About:
        """The collection, or a new one, stored with its first file; ``None`` stands for its choice, or the default.

        Raises :class:`CollectionConflictError` for another choice than the collection's.
        """
        about, deleted_at = None, 0.0
        with _database(self._path(namespace, name)) as database:
            if database is not None:
                about = _about(database)
                (deleted_at,) = database.execute("SELECT deleted_at FROM state").fetchone()
        if about is None:
            # After the deletion, by which put() tells it from the deleted one, even if the clock was set back.
            created_at = max(time.time(), deleted_at + 1e-3)
            return About(name, namespace, system or "", max_tokens or default_tokens, created_at, context_tokens or 0)
        _check_choices(about, system, max_tokens, context_tokens)
        return about

    def put(self, about: About, record: FileRecord, most_bytes: int | None = None) -> None:
        """Stores a file's record in place of its earlier one.

        Raises :class:`CollectionConflictError` if the collection was deleted since it was begun, or begun otherwise,
        and :class:`CollectionQuotaError` if it grows and the namespace's databases have more than ``most_bytes`` then.
        """
        path = self._path(about.namespace, about.name)
        with self._measured(path, most_bytes), _database(path, "IMMEDIATE") as database:
            assert database is not None
            bytes_before = _bytes_of(database)
            _begin_collection(database, about)
            revision = _next_revision(database)
            before = _remove(database, record.file)
            fields = asdict(record)
            passages = fields.pop("passages")
            (file_id,) = database.execute(
                "INSERT INTO files (file, revision, bytes, fields) VALUES (?, ?, ?, ?) RETURNING id",
                (record.file, revision, record.bytes, _json(fields)),
            ).fetchone()
            database.executemany(
                "INSERT INTO passages VALUES (?, ?, ?, ?, ?, ?)",
                (
                    (file_id, number, passage.id, passage.tokens, digest_of(passage), _json(fields))
                    for number, (passage, fields) in enumerate(zip(record.passages, passages, strict=True))
                ),
            )
            _remove_unused_vectors(database, before)
            if most_bytes is not None and (num_bytes := _bytes_of(database)) > bytes_before:
                _check_quota(_bytes_beside(path) + num_bytes, most_bytes)

    @contextmanager
    def _measured(self, path: Path, most_bytes: int | None) -> Iterator[None]:
        """Makes a database if there is none, and has no two files of a namespace with a quota stored at once."""
        with self._lock:
            writing = self._writing.setdefault(path.parent, threading.Lock())
        with writing if most_bytes is not None else nullcontext():
            if most_bytes is not None and not path.exists():
                _check_quota(_bytes_beside(path) + _EMPTY_BYTES, most_bytes)
            _create(path)
            yield

    def record(self, about: About, file: str) -> FileRecord | None:
        """The record of a file; ``None`` if there is none."""
        with _database(self._path(about.namespace, about.name)) as database:
            found = _records(database, "file = ?", file) if database is not None else []
        return found[0] if found else None

    def corpus(self, namespace: str, name: str) -> Corpus:
        """The collection as it is now, the same object until it changes; raises :class:`UnknownCollectionError`."""
        path = self._path(namespace, name)
        with self._lock:
            kept = self._kept.setdefault(path, _Kept())
        with kept.lock, _database(path) as database:
            about = _about(database) if database is not None else None
            if database is None or about is None:
                raise UnknownCollectionError(_unknown(path))
            (revision,) = database.execute("SELECT revision FROM state").fetchone()
            if kept.corpus is None or kept.corpus.about != about:
                kept.corpus, kept.revision = Corpus(about, {}, Vectors(path)), -1
            if kept.revision != revision:
                changed = {each.file: each for each in _records(database, "revision > ?", kept.revision)}
                names = [file for (file,) in database.execute("SELECT file FROM files")]
                files = {file: changed.get(file) or kept.corpus.files[file] for file in names}
                kept.corpus, kept.revision = Corpus(about, files, Vectors(path)), revision
            return kept.corpus

    def summaries(self, namespace: str) -> list[dict[str, Any]]:
        """All collections of a namespace, by name, as :meth:`Corpus.summary`; those that can't be read are left out."""
        summaries = []
        for path in sorted(self._namespace(namespace).glob(f"*{_SUFFIX}")):
            try:
                with _database(path) as database:
                    if database is not None and (about := _about(database)) is not None:
                        (files,) = database.execute("SELECT count(*) FROM files").fetchone()
                        counted = "SELECT count(*), coalesce(sum(tokens), 0) FROM passages"
                        passages, tokens = database.execute(counted).fetchone()
                        summaries.append({**asdict(about), "files": files, "passages": passages, "tokens": tokens})
            except CollectionStorageError as error:
                logger.warning("%s", error)
        return summaries

    def texts(self, namespace: str) -> Iterator[str]:
        """The texts of a namespace's passages, with and without their titles, as far as they can be read."""
        for summary in self.summaries(namespace):
            try:
                passages = self.corpus(namespace, summary["name"]).passages
            except (CollectionStorageError, UnknownCollectionError) as error:
                logger.warning("%s", error)
                continue
            for passage in passages:
                yield passage.text
                yield passage.document.render()

    def vectors(self, about: About) -> "Vectors":
        """The vectors of a collection's passages."""
        return Vectors(self._path(about.namespace, about.name))

    def delete(self, namespace: str, name: str, file: str | None = None) -> tuple[About, list[str]]:
        """Removes a collection, or one of its files; returns the ids of the passages that are gone.

        Raises :class:`UnknownCollectionError`.
        """
        path = self._path(namespace, name)
        with _database(path, "IMMEDIATE") as database:
            about = _about(database) if database is not None else None
            if database is None or about is None:
                raise UnknownCollectionError(_unknown(path))
            removed = _remove(database, file)
            if file is None:
                # The empty database stays: unlinking one that another process has open would damage its successor.
                database.execute("DELETE FROM about")
                database.execute("UPDATE state SET deleted_at = ?", (max(time.time(), about.created_at),))
            elif not removed:
                raise UnknownCollectionError(f"collection {name!r} has no file {file!r}")
            _next_revision(database)
            _remove_unused_vectors(database, removed)
            return about, list(removed)

    def _namespace(self, namespace: str) -> Path:
        """Any text may be a namespace, and no two may share a folder."""
        return self.root / sha256(namespace.encode()).hexdigest()[:32]

    def _path(self, namespace: str, name: str) -> Path:
        if not re.fullmatch(COLLECTION_NAME, name):
            raise UnknownCollectionError(f"no collection can be called {name!r}")
        return self._namespace(namespace) / f"{name}{_SUFFIX}"


class Vectors:
    """Vectors of a collection's passages, by model and :func:`digest_of` the passage. Methods block.

    They raise as :class:`Collections` does.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self, model: str) -> dict[str, bytes]:
        """All vectors of a model."""
        with _database(self._path) as database:
            if database is None:
                return {}
            return dict(database.execute("SELECT digest, vector FROM vectors WHERE model = ?", (model,)))

    def missing(self, model: str, digests: Collection[str]) -> set[str]:
        """Those of ``digests`` that have no vector."""
        with _database(self._path) as database:
            if database is None:
                return set(digests)
            found = "SELECT 1 FROM vectors WHERE digest = ? AND model = ?"
            return {digest for digest in digests if database.execute(found, (digest, model)).fetchone() is None}

    def save(self, model: str, vectors: Mapping[str, bytes]) -> None:
        """Adds vectors of passages; those that are gone meanwhile are left out."""
        with _database(self._path, "IMMEDIATE") as database:
            if database is not None:
                database.executemany(
                    "INSERT OR IGNORE INTO vectors SELECT ?1, ?2, ?3 WHERE EXISTS"
                    " (SELECT 1 FROM passages WHERE digest = ?1)",
                    ((digest, model, vector) for digest, vector in vectors.items()),
                )


@contextmanager
def _database(path: Path, begin: Literal["DEFERRED", "IMMEDIATE"] = "DEFERRED") -> Iterator[sqlite3.Connection | None]:
    """A transaction: of a reader, or (``IMMEDIATE``) of the one writer. ``None`` if there is no database."""
    if not path.exists():
        yield None
        return
    try:
        uri = f"{path.resolve().as_uri()}?mode=rw"
        with closing(sqlite3.connect(uri, uri=True, timeout=_BUSY_S, isolation_level=None)) as database:
            database.execute("PRAGMA foreign_keys = ON")
            database.execute("PRAGMA secure_delete = ON")  # what is deleted shall not be found on the disk
            database.execute(f"BEGIN {begin}")
            _check_version(database)
            yield database
            database.execute("COMMIT")
    except sqlite3.Error as error:
        if isinstance(error, _UnreadableError) or (getattr(error, "sqlite_errorcode", 0) & 0xFF) in _UNREADABLE:
            raise DamagedCollectionError(_set_aside(path, error)) from error
        raise CollectionStorageError(f"{path.name}: {error}") from error


def _create(path: Path) -> None:
    """Makes an empty database, unless there is one. It appears whole."""
    if path.exists():
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".new-", dir=path.parent) as folder:
            new = Path(folder) / path.name
            with closing(sqlite3.connect(new, isolation_level=None)) as database:
                database.executescript(_SCHEMA)
                # A write-ahead log lets readers go on beside a writer, but needs memory that all processes share.
                database.execute(f"PRAGMA journal_mode = {'DELETE' if is_on_network(path.parent) else 'WAL'}")
            with suppress(FileExistsError):  # another process was faster
                os.link(new, path)
    except (OSError, sqlite3.Error) as error:
        raise CollectionStorageError(f"{path.name}: {getattr(error, 'strerror', None) or error}") from error


def _set_aside(path: Path, error: Exception) -> str:
    """Renames a database that can't be read; returns the message about it."""
    aside = path.with_name(f"{path.name}{_DAMAGED}{time.time():.0f}")
    for suffix in ("", "-wal", "-shm"):
        with suppress(FileNotFoundError):
            path.with_name(path.name + suffix).rename(aside.with_name(aside.name + suffix))
    message = (
        f"the database of collection {path.stem!r} is damaged ({error}); it was set aside as {aside.name}: ingest again"
    )
    logger.error("%s: %s", path.parent, message)
    return message


def _unknown(path: Path) -> str:
    damaged = sorted(path.parent.glob(f"{path.name}{_DAMAGED}*[0-9]"))
    hint = f"; its damaged database was set aside as {damaged[-1].name}" if damaged else ""
    return f"there is no collection {path.stem!r}{hint}"


def _check_version(database: sqlite3.Connection) -> None:
    (version,) = database.execute("PRAGMA user_version").fetchone()
    if version == 0:
        raise _UnreadableError("it is empty")
    if version != _VERSION:
        raise sqlite3.OperationalError(f"it is of another version of Tessera ({version}, not {_VERSION})")


def _bytes_of(database: sqlite3.Connection) -> int:
    """Bytes of a database at the end of its transaction."""
    pages, free, size = (
        int(database.execute(f"PRAGMA {name}").fetchone()[0]) for name in ("page_count", "freelist_count", "page_size")
    )
    return (pages - free) * size


def _bytes_beside(path: Path) -> int:
    """Bytes of the other databases of a namespace, deleted and damaged ones included."""
    own, num_bytes = {path.name + suffix for suffix in ("", "-wal", "-shm", "-journal")}, 0
    with suppress(FileNotFoundError):
        for each in os.scandir(path.parent):
            if each.name not in own:
                with suppress(FileNotFoundError):
                    num_bytes += each.stat(follow_symlinks=False).st_size
    return num_bytes


def _check_quota(num_bytes: int, most_bytes: int) -> None:
    if num_bytes > most_bytes:
        raise CollectionQuotaError(f"collections of this tenant may have {most_bytes} bytes altogether: delete some")


def _about(database: sqlite3.Connection) -> About | None:
    found = database.execute("SELECT fields FROM about").fetchone()
    with _parsing():
        return None if found is None else About(**json.loads(found[0]))


def _check_choices(about: About, system: str | None, max_tokens: int | None, context_tokens: int | None) -> None:
    if system is not None and system != about.system:
        raise CollectionConflictError(
            f"collection {about.name!r} is computed behind another system prompt: delete it first"
        )
    if max_tokens is not None and max_tokens != about.max_tokens:
        raise CollectionConflictError(
            f"collection {about.name!r} has passages of {about.max_tokens} tokens at most: delete it first"
        )
    if context_tokens is not None and context_tokens != about.context_tokens:
        raise CollectionConflictError(
            f"collection {about.name!r} has passages behind {about.context_tokens} tokens of context: delete it first"
        )


def _begin_collection(database: sqlite3.Connection, about: About) -> None:
    """Stores ``about`` unless another call has; raises :class:`CollectionConflictError`."""
    (deleted_at,) = database.execute("SELECT deleted_at FROM state").fetchone()
    if about.created_at <= deleted_at:
        raise CollectionConflictError(f"collection {about.name!r} was deleted meanwhile: send its files again")
    if (existing := _about(database)) is not None:
        _check_choices(existing, about.system, about.max_tokens, about.context_tokens)
    else:
        database.execute("INSERT INTO about VALUES (?)", (_json(asdict(about)),))


def _records(database: sqlite3.Connection, condition: str, value: Any) -> list[FileRecord]:
    """The files for which an SQL condition holds."""
    files = database.execute(f"SELECT id, fields FROM files WHERE {condition}", (value,)).fetchall()
    records = []
    for id, fields in files:
        passages = database.execute("SELECT fields FROM passages WHERE file_id = ? ORDER BY number", (id,))
        with _parsing():
            given = {**json.loads(fields), "passages": [json.loads(passage) for (passage,) in passages]}
            records.append(FileRecord.of_json(given))
    return records


@contextmanager
def _parsing() -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError, KeyError) as error:
        raise _UnreadableError(f"{type(error).__name__}: {error}") from error


def _next_revision(database: sqlite3.Connection) -> int:
    (revision,) = database.execute("UPDATE state SET revision = revision + 1 RETURNING revision").fetchone()
    return int(revision)


def _remove(database: sqlite3.Connection, file: str | None) -> dict[str, str]:
    """Removes a file, or all; returns the digests of its passages, by their ids."""
    condition, values = ("file = ?", (file,)) if file is not None else ("true", ())
    found = f"SELECT passages.id, digest FROM passages JOIN files ON file_id = files.id WHERE {condition}"
    removed = dict(database.execute(found, values).fetchall())
    database.execute(f"DELETE FROM files WHERE {condition}", values)
    return removed


def _remove_unused_vectors(database: sqlite3.Connection, removed: Mapping[str, str]) -> None:
    database.executemany(
        "DELETE FROM vectors WHERE digest = ?1 AND NOT EXISTS (SELECT 1 FROM passages WHERE digest = ?1)",
        ((digest,) for digest in removed.values()),
    )


def _json(fields: dict[str, Any]) -> str:
    return json.dumps(fields, ensure_ascii=False)
