# SPDX-License-Identifier: Apache-2.0
"""Registered chunk ids in the tiers that outlive the server: restarts and servers that share a tier find them there."""

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterable
from typing import Annotated, Final

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from cache.manager import ChunkCacheManager
from cache.positions.layout import PackedTokens, pack
from cache.segments.chunk_ids import ChunkName, RegisteredText
from cache.segments.hashing import CacheScope, ChunkHash
from cache.segments.index import ChunkKVCache, SegmentIdentity
from engine_ext.chunks.transfers import PoolTransfers, TransferError
from engine_ext.wire.id_record import record_key
from replicas.document_keys import id_key

logger = logging.getLogger(__name__)

_FLUSH_S: Final = 0.1
_KEY_BYTES: Final = 16


def _whole(tokens: PackedTokens) -> PackedTokens:
    if len(tokens) % len(pack((0,))):
        raise ValueError("a part of a token")
    return tokens


_Tokens = Annotated[bytes, AfterValidator(_whole)]


class _Strict(BaseModel):
    """A part of a record. Its errors don't quote it: they go into the log, and a record has a document's text."""

    model_config = ConfigDict(strict=True, val_json_bytes="hex", ser_json_bytes="hex", hide_input_in_errors=True)


class _Segment(_Strict):
    key: bytes = Field(min_length=_KEY_BYTES, max_length=_KEY_BYTES)
    adapter: str
    prefix: _Tokens
    tokens: _Tokens = Field(min_length=1)
    created_at: FiniteFloat
    expires_at: FiniteFloat | None


class _Record(_Strict):
    """``namespace`` is ``None`` if it has a client's salt, which is a secret."""

    id: str
    namespace: str | None
    text: str
    title: str | None
    context: str | None = None
    segments: list[_Segment] = Field(fail_fast=True)
    """The first wrong one ends it: a fault for each of millions would take memory."""


class IdRecords:
    """Writes the ids that change, and reads those that are asked for. ``is_kept``: whether a tier outlives the server.

    A record has the id's text, and tokens, positions and expiry of its segments.
    """

    def __init__(
        self, manager: ChunkCacheManager, transfers: Callable[[], PoolTransfers | None], *, is_kept: bool
    ) -> None:
        self._fingerprint, self._clock = manager.config.fingerprint, manager.clock
        self._ids, self._away, self._holdings, self._find = manager.ids, manager.away, manager.holdings, manager.find
        self._transfers = transfers
        self._is_kept = is_kept
        self._changed: dict[ChunkName, int] = {}
        self._changes = itertools.count()
        self._writing = asyncio.Lock()

    def __len__(self) -> int:
        return len(self._changed)

    def changed(self, name: ChunkName) -> None:
        """Queues the record of an id that was registered, or removed for good."""
        if self._is_kept:
            self._changed[name] = next(self._changes)

    async def run(self) -> None:
        """Reads all records once, and writes changed ones until cancelled."""
        await asyncio.gather(self._recall_all(), self._flush_always())

    async def flush(self, namespace: str | None = None) -> None:
        """Writes the records that have changed: of ``namespace``, if given, whatever others' still wait."""
        while names := [name for name in self._changed if namespace in (None, name.namespace)]:
            for name in names:
                async with self._writing:  # of one record: nobody waits for all of them
                    await self._write_change(name)

    async def _write_change(self, name: ChunkName) -> None:
        if (change := self._changed.get(name)) is None:
            return  # another flush has written it
        await self._write(name)
        if self._changed.get(name) == change:
            del self._changed[name]

    async def recall(self, namespace: str, ids: Iterable[str]) -> None:
        """Registers those of the ids that are unknown here and have a record."""
        if not self._is_kept:
            return
        names = {ChunkName(namespace, id) for id in ids}
        unknown = [n for n in names if n not in self._changed and self._ids.registration(n) is None]
        await asyncio.gather(*(self._recall(self._key(name), name) for name in unknown))

    async def _flush_always(self) -> None:
        while True:
            await self.flush()
            await asyncio.sleep(_FLUSH_S)

    async def _recall_all(self) -> None:
        if self._is_kept and (transfers := self._transfers()) is not None:
            try:
                for key in await transfers.list_records():
                    await self._recall(key, None)
            except TransferError as error:
                logger.warning("can't list the chunk ids in tiers: %s", error)

    async def _recall(self, key: ChunkHash, name: ChunkName | None) -> None:
        """Registers the id of a record; without ``name``, only one whose namespace is no secret."""
        if (transfers := self._transfers()) is None:
            return
        try:
            tier, data = await transfers.find_record(key)
        except TransferError as error:
            logger.warning("can't read a chunk id from tiers: %s", error)
            return
        if tier is None:
            return
        try:
            record = _Record.model_validate_json(data)
        except ValidationError as error:
            # Whoever may write to the tier may have written it: the others are recalled nevertheless.
            first = error.errors()[0]
            why = ": ".join(map(str, (*first["loc"], first["msg"])))
            logger.warning("the record of a chunk id in tier %s is none: %s", tier, why)
            return
        if name is None and record.namespace is not None:
            name = ChunkName(record.namespace, record.id)
        if name is not None and key == self._key(name) and name not in self._changed:
            self._restore(name, record, tier)

    def _restore(self, name: ChunkName, record: _Record, tier: str) -> None:
        content = RegisteredText(record.text, record.title, record.context)
        for each in record.segments:
            key = ChunkHash(each.key)
            if each.expires_at is not None and each.expires_at <= self._clock():
                continue
            if (entry := self._find(key)) is None:
                identity = SegmentIdentity(CacheScope(name.namespace, each.adapter), each.prefix, each.tokens)
                entry = self._away.restore(key, identity, (tier,), each.created_at, each.expires_at)
            self._ids.restore(name, content, key)
            self._holdings.add(id_key(*name), entry)
        if self._ids.registration(name) is None:
            self.changed(name)  # expired: its record is dropped

    async def _write(self, name: ChunkName) -> None:
        if (transfers := self._transfers()) is None:
            return
        try:
            if (data := self._record(name)) is None:
                await transfers.drop(self._key(name))
            else:
                await transfers.keep_record(self._key(name), data)
        except TransferError as error:
            logger.warning("can't keep a chunk id in tiers: %s", error)

    def _record(self, name: ChunkName) -> bytes | None:
        if (registration := self._ids.registration(name)) is None:
            return None
        content, keys = registration
        entries = map(self._find, sorted(keys))
        is_secret = "\0" in name.namespace  # it has a client's salt
        record = _Record(
            id=name.id,
            namespace=None if is_secret else name.namespace,
            text=content.text,
            title=content.title,
            context=content.context,
            segments=[_segment(entry) for entry in entries if entry is not None],
        )
        return record.model_dump_json().encode()

    def _key(self, name: ChunkName) -> ChunkHash:
        return ChunkHash(record_key(self._fingerprint, *name))


def _segment(entry: ChunkKVCache) -> _Segment:
    identity = entry.identity
    return _Segment(
        key=entry.key.digest,
        adapter=identity.scope.adapter,
        prefix=identity.prefix,
        tokens=identity.tokens,
        created_at=entry.created_at,
        expires_at=entry.expires_at,
    )
