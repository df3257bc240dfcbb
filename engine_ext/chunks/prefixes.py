# SPDX-License-Identifier: Apache-2.0
"""Prefixes of prompts in tiers, as the app sees them: which requests use them, and how many wait."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final

from cache.metrics import ChunkCacheMetrics
from cache.segments.hashing import CacheScope
from engine_ext.chunks.tier_source import note_events
from engine_ext.chunks.transfers import PoolTransfers, TransferError
from engine_ext.wire.prefix import PrefixTag, namespace_digest
from engine_ext.wire.worker_messages import BlockMessage, CountBlocks, DropBlocks, StopBlocks

logger = logging.getLogger(__name__)

_LOOK_S: Final = 0.5
_LEAST_PROMPT: Final = 256
"""Tokens of a prompt from which on a look-up, which takes some milliseconds, is worth its time."""
_LEAST_BEHIND_CHUNKS: Final = 0.25
"""Length of what follows the chunks, as a share of them, from which on tiers may keep a composed prompt."""


class Prefixes:
    """The prefixes that the workers keep in tiers, until storing and sharing stop."""

    def __init__(self, metrics: ChunkCacheMetrics, transfers: Callable[[], PoolTransfers | None]) -> None:
        self._metrics = metrics
        self._transfers = transfers
        self.num_waiting = 0
        """Blocks that a worker has still to store, half a second ago; at least one while requests run."""
        self._num_marked = 0

    def params(self, scope: CacheScope, num_prompt: int, num_chunked: int = 0) -> dict[str, Any]:
        """``kv_transfer_params`` of a request whose prefix may come from tiers.

        The first ``num_chunked`` tokens of ``num_prompt`` are chunks, which tiers have anyway: such a prompt is stored,
        and looked up, which takes a round trip, only if enough follows. Adapters' weights are known in this process
        only, so nothing behind them is kept.
        """
        if scope.adapter or num_prompt < _LEAST_PROMPT or self._kept_by() is None:
            return {}
        if num_prompt - num_chunked < _LEAST_BEHIND_CHUNKS * num_chunked:
            return {}
        self._num_marked += 1
        self.num_waiting = max(1, self.num_waiting)
        return PrefixTag.of(scope.owner, num_chunked).to_params()

    async def drop(self, namespace: str | None) -> None:
        """Drops a namespace's prefixes, or all, from the tiers."""
        await self._ask(DropBlocks(namespace_digest(namespace)) if namespace is not None else DropBlocks())

    async def stop(self) -> None:
        """Stores and loads nothing from now on."""
        await self._ask(StopBlocks())

    async def run(self) -> None:
        """Looks after the workers until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_S)
            await self._ask(CountBlocks())

    async def _ask(self, message: BlockMessage) -> None:
        if (transfers := self._kept_by()) is None:
            return
        num_marked = self._num_marked
        try:
            answers = await transfers.ask_for_blocks(message)
        except TransferError as error:
            logger.warning("prefixes in tiers: %s", error)
            return
        if isinstance(message, CountBlocks):
            note_events(self._metrics, answers)
            if num_marked == self._num_marked:
                self.num_waiting = max(answer.count for answer in answers)

    def _kept_by(self) -> PoolTransfers | None:
        transfers = self._transfers()
        return transfers if transfers is not None and transfers.keeps_prefixes else None
