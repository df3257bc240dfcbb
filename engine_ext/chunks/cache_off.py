# SPDX-License-Identifier: Apache-2.0
"""The reason why an engine has no chunk cache."""

from collections.abc import Iterable
from typing import Final, NoReturn

from cache.errors import FullAttentionError
from cache.eviction.removal import Removal
from cache.metrics import ChunkCacheMetrics
from cache.segments.hashing import ChunkHash, ChunkHasher
from cache.segments.holdings import Holdings


class CacheOff:
    """No chunk cache: finds, holds and stores nothing; refuses every use for ``reason``."""

    placement: Final = "copy"
    block_order: Final = "unknown"
    transfers: Final = None
    prefixes: Final = None
    no_attention: Final = "the chunk cache is off"
    num_tokens: Final = 0
    num_to_store: Final = 0

    def __init__(self, reason: str) -> None:
        self.reason = reason
        self.hasher = ChunkHasher("")
        self.holdings = Holdings()
        self.metrics = ChunkCacheMetrics()

    def usable(self) -> NoReturn:
        """Raises :class:`FullAttentionError`."""
        raise FullAttentionError("cache off", self.reason)

    async def known_ids(self, namespace: str, wanted: Iterable[str]) -> None:
        """No registered chunk ids."""

    def is_crowded(self, owner: str | None = None) -> bool:
        """False: no fill waits."""
        return False

    def clear(self, namespace: str | None = None, why: Removal = Removal.CLEARED) -> list[ChunkHash]:
        """Nothing to drop."""
        return []

    async def drop_from_tiers(self, keys: Iterable[ChunkHash], namespace: str | None) -> None:
        """Nothing to drop."""

    async def stop_sharing(self) -> None:
        """Nothing is shared."""
