# SPDX-License-Identifier: Apache-2.0
"""A replica's side of the registry: heartbeats and claims on documents."""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from contextlib import suppress

from cache.segments.holdings import Holdings
from replicas.redis_registry import CLAIM_TTL_S
from replicas.registry import Registry, RegistryError, Replica

logger = logging.getLogger(__name__)

FLUSH_S = 0.1
"""Interval at which changes are sent, batched into one round trip."""
BEAT_S = 1.0
MOST_AT_ONCE = 5000


class Publisher:
    """Publishes one replica until :meth:`run` is cancelled; survives failures of the registry.

    After a failure, the replica takes a new id and publishes all its claims again: claims under the old id may be wrong
    and no longer count.
    """

    def __init__(self, registry: Registry, describe: Callable[[str], Replica | None], holdings: Holdings) -> None:
        """``describe(id)`` returns the replica's current state, or ``None`` if it accepts no more requests.

        Stored documents are claimed for the last of its storages, which most replicas share.
        """
        self.is_up: bool | None = None  # until the registry is first asked
        self.num_published = 0
        self.num_errors = 0
        self._registry = registry
        self._describe = describe
        self._holdings = holdings
        self._id = _new_id()
        self._former_ids: set[str] = set()
        self._storage: str | None = None
        self._next_beat = 0.0
        self._next_repeat = time.monotonic() + CLAIM_TTL_S / 2

    @property
    def replica_id(self) -> str | None:
        """The replica's id in the registry; ``None`` while the registry is unreachable."""
        return self._id if self.is_up else None

    async def run(self) -> None:
        """Publishes until cancelled; the replica then leaves the registry."""
        try:
            while True:
                try:
                    await self._step()
                    self._note(is_up=True)
                    await asyncio.sleep(FLUSH_S)
                except RegistryError as error:
                    self._begin_anew(error)
                    await asyncio.sleep(BEAT_S)
        finally:
            with suppress(RegistryError):
                await self._leave()

    async def _step(self) -> None:
        now = time.monotonic()
        if now >= self._next_beat:
            self._next_beat = now + BEAT_S
            replica = self._describe(self._id)
            if replica is None:
                return await self._leave()
            self._storage = replica.storages[-1] if replica.storages else None
            if not await self._registry.beat(replica):
                self._holdings.tell_all()
            await self._leave(only_former=True)
        if now >= self._next_repeat:
            self._next_repeat = now + CLAIM_TTL_S / 2
            self._holdings.tell_all()
        held, stored = self._holdings.take_changes(MOST_AT_ONCE)
        if held:
            await self._registry.publish(self._id, held)
            self.num_published += len(held)
        if stored and self._storage is not None:
            await self._registry.publish(self._storage, stored)
        return None

    async def _leave(self, *, only_former: bool = False) -> None:
        for id in [*self._former_ids, *([] if only_former else [self._id])]:
            await self._registry.leave(id)
            self._former_ids.discard(id)

    def _begin_anew(self, error: RegistryError) -> None:
        self.num_errors += 1
        self._note(is_up=False, why=f": {error}")
        self._former_ids.add(self._id)
        self._id, self._next_beat = _new_id(), 0.0

    def _note(self, *, is_up: bool, why: str = "") -> None:
        if is_up != self.is_up:
            level = logging.INFO if is_up else logging.WARNING
            logger.log(level, "registry %s%s", "reached" if is_up else "lost", why)
        self.is_up = is_up


def _new_id() -> str:
    return secrets.token_hex(6)
