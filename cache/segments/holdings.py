# SPDX-License-Identifier: Apache-2.0
"""Documents that a replica holds, and the changes since it last published them."""

from collections import defaultdict
from enum import IntEnum
from typing import Final, NamedTuple

from cache.segments.hashing import ChunkHash
from cache.segments.index import ChunkKVCache, EntryState

HOST: Final = "host"
"""Name of the tier that ends with its server."""


class Tier(IntEnum):
    """Place of a document's KV, the fastest first. ``DISK`` is any tier that outlives its server."""

    DEVICE = 0
    HOST = 1
    DISK = 2


class DocumentKey(NamedTuple):
    """Names one document behind one system prompt in one namespace (:mod:`replicas.document_keys`); 16 bytes."""

    digest: bytes


class Holding(NamedTuple):
    """KV of one document: its place and its tokens."""

    tier: Tier
    tokens: int


Changes = dict[DocumentKey, Holding | None]


class Holdings:
    """Documents with cached chunks; of a long document in parts, some may be missing.

    A replica holds them itself, in pool or host memory, and storage does that outlives it, perhaps for other replicas.
    """

    def __init__(self) -> None:
        self._parts: dict[DocumentKey, dict[ChunkHash, ChunkKVCache]] = {}
        self._documents: defaultdict[ChunkHash, set[DocumentKey]] = defaultdict(set)
        self._changed: dict[DocumentKey, None] = {}
        self._dropped: set[DocumentKey] = set()

    def __len__(self) -> int:
        return len(self._parts)

    def add(self, document: DocumentKey, entry: ChunkKVCache) -> None:
        """Records that a chunk, which can be found, is (part of) a document."""
        parts = self._parts.setdefault(document, {})
        if entry.key not in parts:
            self._documents[entry.key].add(document)
            self._changed[document] = None
        parts[entry.key] = entry

    def moved(self, entry: ChunkKVCache) -> None:
        """Records that a chunk has come to other places: pool or tiers."""
        for document in self._documents.get(entry.key, ()):
            self._parts[document][entry.key] = entry
            self._changed[document] = None

    def removed(self, key: ChunkHash, *, for_good: bool = False) -> None:
        """Records that a chunk was forgotten, or, ``for_good``, is dropped from storage, too."""
        for document in self._documents.pop(key, ()):
            parts = self._parts[document]
            del parts[key]
            if not parts:
                del self._parts[document]
            self._changed[document] = None
            if for_good:
                self._dropped.add(document)

    def held(self, document: DocumentKey) -> Holding | None:
        """The replica's own part of a document, if none of it is in storage only."""
        parts = self._parts.get(document, {}).values()
        tier = max(map(_tier, parts), default=Tier.DISK)
        return None if tier is Tier.DISK else Holding(tier, sum(entry.num_tokens for entry in parts))

    def stored(self, document: DocumentKey) -> Holding | None:
        """A document whose known parts are all in storage."""
        parts = self._parts.get(document, {}).values()
        if not parts or not all(set(entry.tiers) - {HOST} for entry in parts):
            return None
        return Holding(Tier.DISK, sum(entry.num_tokens for entry in parts))

    def tell_all(self) -> None:
        """Counts everything as changed."""
        self._changed.update(dict.fromkeys(self._parts))

    def take_changes(self, most: int) -> tuple[Changes, Changes]:
        """Removes and returns up to ``most`` changed documents, oldest changes first: held ones, and stored ones.

        Of those that are no longer stored, only dropped ones are among the latter: other replicas know of the others.
        """
        documents = [document for document, _ in zip(self._changed, range(most), strict=False)]
        stored: Changes = {}
        for document in documents:
            del self._changed[document]
            if (found := self.stored(document)) is not None or document in self._dropped:
                stored[document] = found
            self._dropped.discard(document)
        return {document: self.held(document) for document in documents}, stored


def _tier(entry: ChunkKVCache) -> Tier:
    if entry.state is not EntryState.STORED:
        return Tier.DEVICE
    return Tier.HOST if HOST in entry.tiers else Tier.DISK
