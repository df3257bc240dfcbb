# SPDX-License-Identifier: Apache-2.0
"""The interface of sources of missing segments: tiers, and other replicas."""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from cache.lease import ChunkStatus, FillJob
from cache.segments.holdings import DocumentKey
from cache.segments.index import ChunkKVCache


class SourceResult(NamedTuple):
    """The ``origin`` of segments; with status ``filled``, the reason for computing them instead."""

    status: ChunkStatus
    origin: str | None = None
    why: str | None = None


class ChunkSource(Protocol):
    """A source of missing segments that are computed already."""

    async def fetch(self, job: FillJob, documents: Mapping[ChunkKVCache, DocumentKey]) -> SourceResult | None:
        """Fills all of the job's entries; ``None`` if it can't.

        After it returns, even if cancelled, it writes nothing to the entries' pages.
        """
