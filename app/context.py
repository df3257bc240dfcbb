# SPDX-License-Identifier: Apache-2.0
"""State that the endpoints and middleware of a server share."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from app.collections.retrieval import Retrieval
from app.documents.extraction import Extraction
from app.documents.patterns import Pattern, finds_by
from app.profile import Profile
from app.prompt.marks import Marks
from app.settings import Settings
from cache.report import FindsDocuments
from engine_ext.client.engine import ChunkEngine
from engine_ext.client.request import CacheOptions
from replicas.redis_registry import RedisRegistry


@dataclass(slots=True, eq=False)
class ServerContext:
    """Made once, at the server's start; ``tessera`` in the application's state, beside what vLLM keeps there.

    ``patterns`` are those of ``--documents``; ``profile`` decides what requests leave open. Without a ``registry``,
    nobody asks who holds a document.
    """

    engine: ChunkEngine
    settings: Settings
    retrieval: Retrieval
    patterns: Sequence[Pattern]
    marks: Marks
    extraction: Extraction
    profile: Profile | None = None
    registry: RedisRegistry | None = None
    defaults: CacheOptions = field(init=False)
    """The cache options of a request that names none."""
    finds: FindsDocuments = field(init=False)
    """Whether documents are looked for in a prompt that doesn't say."""

    def __post_init__(self) -> None:
        self.defaults = self.settings.cache_defaults()
        self.finds = finds_by(self.settings.documents)
