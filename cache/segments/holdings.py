# SPDX-License-Identifier: Apache-2.0
"""Documents that a replica holds, and the changes since it last published them."""

from collections import defaultdict
from enum import IntEnum
from typing import NamedTuple

from cache.segments.hashing import ChunkHash
from cache.segments.index import ChunkKVCache


class Tier(IntEnum):
    """Place of a document's KV in a replica, the fastest first."""

    DEVICE = 0
    HOST = 1
    DISK = 2


class DocumentKey(NamedTuple):
    """Names one document behind one system prompt in one namespace (:mod:`replicas.document_keys`); 16 bytes."""

    digest: bytes


class Holding(NamedTuple):
    """One replica's KV of one document: tier, tokens, and bytes on all devices."""

    tier: Tier
    tokens: int
    num_bytes: int


class Holdings:
    """Documents with cached chunks; of a long document in parts, some may be missing."""

    def __init__(self, page_bytes: int) -> None:
        self._page_bytes = page_bytes
        self._parts: dict[DocumentKey, dict[ChunkHash, ChunkKVCache]] = {}
        self._documents: defaultdict[ChunkHash, set[DocumentKey]] = defaultdict(set)
        self._changed: dict[DocumentKey, None] = {}

    def __len__(self) -> int:
        return len(self._parts)

    def add(self, document: DocumentKey, entry: ChunkKVCache) -> None:
        """Records that a chunk, which can be loaded and found, is (part of) a document."""
        parts = self._parts.setdefault(document, {})
        if entry.key not in parts:
            self._documents[entry.key].add(document)
            self._changed[document] = None
        parts[entry.key] = entry

    def removed(self, key: ChunkHash) -> None:
        """Records that a chunk was detached."""
        for document in self._documents.pop(key, ()):
            parts = self._parts[document]
            del parts[key]
            if not parts:
                del self._parts[document]
            self._changed[document] = None

    def holding(self, document: DocumentKey) -> Holding | None:
        """The cached part of a document."""
        if (parts := self._parts.get(document)) is None:
            return None
        tokens = sum(entry.identity.num_tokens for entry in parts.values())
        return Holding(Tier.DEVICE, tokens, self._page_bytes * sum(entry.num_pages for entry in parts.values()))

    def tell_all(self) -> None:
        """Counts everything as changed."""
        self._changed.update(dict.fromkeys(self._parts))

    def take_changes(self, most: int) -> dict[DocumentKey, Holding | None]:
        """Removes and returns up to ``most`` changed documents with their holdings, oldest changes first."""
        documents = [document for document, _ in zip(self._changed, range(most), strict=False)]
        for document in documents:
            del self._changed[document]
        return {document: self.holding(document) for document in documents}
