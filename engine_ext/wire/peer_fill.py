# SPDX-License-Identifier: Apache-2.0
"""Segments that one replica has another compute, as JSON."""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cache.lease import FillJob
from cache.positions.layout import Chunk, ChunkedPrompt, PackedTokens, unpack
from cache.segments.hashing import CacheScope
from cache.segments.holdings import DocumentKey
from cache.segments.index import ChunkKVCache


@dataclass(frozen=True, slots=True)
class PeerSegment:
    """One segment: the tokens before it, its own, and the registry's key of its document, if any."""

    prefix: PackedTokens
    tokens: PackedTokens
    is_system: bool
    document: DocumentKey | None


@dataclass(frozen=True, slots=True)
class PeerFill:
    """The segments of one fill job, in the scope ``namespace`` of the base model; a system segment comes first."""

    namespace: str
    segments: tuple[PeerSegment, ...]

    @classmethod
    def of_job(cls, job: FillJob, documents: Mapping[ChunkKVCache, DocumentKey]) -> "PeerFill":
        """A job of this replica, which is not private."""
        segments = [
            PeerSegment(entry.identity.prefix, entry.identity.tokens, entry.is_system, documents.get(entry))
            for entry in job.entries
        ]
        return cls(job.entries[0].identity.scope.namespace, tuple(segments))

    @property
    def scope(self) -> CacheScope:
        """The scope of the segments."""
        return CacheScope(self.namespace)

    def prompt(self) -> ChunkedPrompt:
        """A prompt with these segments. Its question, which it must have, is computed by nobody."""
        last = self.segments[-1]
        if last.is_system:
            return ChunkedPrompt(unpack(last.tokens), (), (0,))
        return ChunkedPrompt(unpack(last.prefix), (Chunk(last.tokens),), (0,))

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        segments = [
            {
                "prefix": each.prefix.hex(),
                "tokens": each.tokens.hex(),
                "is_system": each.is_system,
                "document": each.document.digest.hex() if each.document is not None else None,
            }
            for each in self.segments
        ]
        return {"namespace": self.namespace, "segments": segments}

    @classmethod
    def from_dict(cls, fields: Any) -> "PeerFill":
        """The inverse of :meth:`to_dict`; raises ``ValueError``."""
        try:
            segments = tuple(_segment(**each) for each in fields["segments"])
            fill = cls(str(fields["namespace"]), segments)
            _ = fill.prompt().token_ids  # raises if they are none
        except (TypeError, KeyError, IndexError, ValueError, struct.error) as error:
            raise ValueError(f"no segments to compute: {error!r}") from error
        return fill


def _segment(prefix: str, tokens: str, is_system: bool, document: str | None) -> PeerSegment:
    key = DocumentKey(bytes.fromhex(document)) if document is not None else None
    return PeerSegment(bytes.fromhex(prefix), bytes.fromhex(tokens), bool(is_system), key)
