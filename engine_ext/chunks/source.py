# SPDX-License-Identifier: Apache-2.0
"""The interface of places that missing segments may come from: tiers, and other replicas."""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from cache.lease import ChunkStatus, FillJob
from cache.segments.holdings import DocumentKey
from cache.segments.index import ChunkKVCache


class SourceResult(NamedTuple):
    """Segments that came from ``origin``; with the status ``filled``, why they are to be computed all the same."""

    status: ChunkStatus
    origin: str | None = None
    why: str | None = None


class ChunkSource(Protocol):
    """Where missing segments may be had without computing them."""

    async def fetch(self, job: FillJob, documents: Mapping[ChunkKVCache, DocumentKey]) -> SourceResult | None:
        """Fills all of the job's entries; ``None`` if it has nothing to say of them.

        When it returns, even if cancelled, nothing is written to the entries' pages any more.
        """
