# SPDX-License-Identifier: Apache-2.0
"""Looks up a request's documents before the engine is called."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from app.cluster.router.chooser import MOST_ASKED
from app.cluster.router.directory import REFRESH_S
from app.documents.request_documents import Reading, conversation_of, parse_body, wanted_documents
from replicas.registry import Claim, Registry, RegistryError
from replicas.routing import Wanted

logger = logging.getLogger(__name__)


class Lookup:
    """Finds requests' documents and their holders, with one registry query per request.

    Ray knows the replicas. Their current ids in the registry, and those of their storage, are refreshed by :meth:`run`,
    so that no request waits for them. While the registry is lost, documents have no claims.
    """

    def __init__(self, registry: Registry | None, reading: Reading) -> None:
        self._registry = registry
        self._reading = reading
        self._names: dict[str, list[str]] = {}
        self._num_replicas = 0
        self._is_up = False

    async def documents(self, path: str, body: bytes) -> list[Wanted]:
        """The documents of a request to ``path``, with claims; without documents, its conversation."""
        if (parsed := parse_body(path, body)) is None:
            return []
        wanted = wanted_documents(path, parsed, self._reading)[:MOST_ASKED]
        if self._registry is None or not wanted or self._num_replicas < 2:
            return wanted or conversation_of(parsed)
        try:
            claims = await self._registry.claims([document.key for document in wanted])
        except RegistryError as error:
            self._note_lost(error)
            return wanted
        return [replace(each, claims=self._by_name(found)) for each, found in zip(wanted, claims, strict=True)]

    async def run(self) -> None:
        """Refreshes until cancelled."""
        while self._registry is not None:
            await self.refresh(self._registry)
            await asyncio.sleep(REFRESH_S)

    async def refresh(self, registry: Registry) -> None:
        """Reads the replicas' ids from the registry."""
        try:
            replicas = await registry.replicas()
        except RegistryError as error:
            self._note_lost(error)
            return
        names: defaultdict[str, list[str]] = defaultdict(list)
        for replica in replicas:
            for holder in (replica.id, *replica.storages):
                names[holder].append(replica.name)
        self._names, self._num_replicas = dict(names), len(replicas)
        if not self._is_up:
            logger.info("registry reached: %d replicas", len(replicas))
        self._is_up = True

    def _by_name(self, claims: Sequence[Claim]) -> list[Claim]:
        return [Claim(name, claim.holding) for claim in claims for name in self._names.get(claim.holder, ())]

    def _note_lost(self, error: RegistryError) -> None:
        if self._is_up:
            logger.warning("registry lost: %s; routing by hash and load", error)
        self._is_up = False
        self._names, self._num_replicas = {}, 0
