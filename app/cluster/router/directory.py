# SPDX-License-Identifier: Apache-2.0
"""The replicas as a router knows them: from the registry, and from its own requests."""

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from http import HTTPStatus
from itertools import islice

import httpx

from app.cluster.router.metrics import RouterMetrics
from cache.segments.holdings import DocumentKey
from replicas.redis_registry import MOST_REPLICAS
from replicas.registry import Claim, Registry, RegistryError, Replica

logger = logging.getLogger(__name__)

REFRESH_S = 1.0
_PROBE_S = 2.0
_MOST_PROBES = 64
"""At once: each takes a connection, and all together would hold up requests, and each other until they look silent."""


class Directory:
    """The live replicas, kept up to date by :meth:`run`.

    A replica that the registry no longer names, or that a request could not reach, is probed: the registry may have
    lost data. A replica that does not answer gets no requests, and is forgotten once the registry answers without
    naming it; nobody waits for it then. Of many, some are probed each time; the others stay what they were.
    """

    def __init__(self, registry: Registry, client: httpx.AsyncClient, metrics: RouterMetrics) -> None:
        self.is_up: bool | None = None  # until the registry is first asked
        self._registry = registry
        self._client = client
        self._metrics = metrics
        self._known: dict[str, Replica] = {}
        self._suspects: set[str] = set()
        self._limits: set[tuple[str, asyncio.Timeout]] = set()

    @property
    def replicas(self) -> list[Replica]:
        """Replicas that get requests, sorted by name."""
        return [replica for url, replica in self._known.items() if url not in self._suspects]

    def __contains__(self, replica: Replica) -> bool:
        """Whether ``replica`` is known, and not forgotten."""
        return replica.url in self._known

    def suspect(self, replica: Replica) -> None:
        """Keeps requests from ``replica`` until it answers a probe."""
        self._suspects.add(replica.url)

    @asynccontextmanager
    async def while_there(self, replica: Replica) -> AsyncIterator[None]:
        """Raise ``TimeoutError`` within the context if ``replica`` is forgotten because it doesn't answer.

        A process that is stopped keeps its connections open. One that answers at all may end what it has begun.
        """
        async with asyncio.timeout(None) as limit:
            waits = replica.url, limit
            self._limits.add(waits)
            try:
                yield
            finally:
                self._limits.discard(waits)

    async def run(self) -> None:
        """Refreshes every second until cancelled."""
        while True:
            await self.refresh()
            await asyncio.sleep(REFRESH_S)

    async def refresh(self) -> None:
        """Reads the registry and probes doubtful replicas."""
        listed = await self._listed()
        doubtful = {url: self._known[url] for url in self._suspects if url in self._known}
        if listed is not None:
            doubtful |= {url: replica for url, replica in self._known.items() if url not in listed}
        probed = random.sample(sorted(doubtful), min(_MOST_PROBES, len(doubtful)))
        answers = await asyncio.gather(*(self._probed(doubtful[url]) for url in probed))
        statuses = dict(zip(probed, answers, strict=True))
        silent = {url for url, status in statuses.items() if status != HTTPStatus.OK}
        if listed is not None:
            kept = {url: replica for url, replica in self._known.items() if url not in silent}
            known = islice({**kept, **listed}.items(), MOST_REPLICAS)
            self._known = dict(sorted(known, key=lambda item: item[1].name))
            self._leave({url for url, status in statuses.items() if status is None} - listed.keys())
        self._suspects = ((self._suspects - set(probed)) | silent) & self._known.keys()
        self._metrics.replicas.set(len(self.replicas))

    async def claims(self, keys: Sequence[DocumentKey]) -> list[list[Claim]]:
        """Claims to each document; none while the registry is lost, so that requests don't wait."""
        if self.is_up:
            try:
                return await self._registry.claims(keys)
            except RegistryError as error:
                self._note_lost(error)
        return [[] for _ in keys]

    async def _listed(self) -> dict[str, Replica] | None:
        try:
            listed = await self._registry.replicas()
        except RegistryError as error:
            self._note_lost(error)
            return None
        if not self.is_up:
            logger.info("registry reached: %d replicas", len(listed))
        self.is_up = True
        self._metrics.registry_up.set(1)
        return {replica.url: replica for replica in listed}

    def _note_lost(self, error: RegistryError) -> None:
        if self.is_up is not False:
            logger.warning("registry lost: %s; routing by hash and load", error)
        self.is_up = False
        self._metrics.registry_up.set(0)
        self._metrics.registry_errors.inc()

    def _leave(self, gone: set[str]) -> None:
        """End all waiting for replicas at these URLs."""
        for waits in [waits for waits in self._limits if waits[0] in gone]:
            self._limits.discard(waits)
            waits[1].reschedule(asyncio.get_running_loop().time())

    async def _probed(self, replica: Replica) -> int | None:
        """The status of its health; ``None`` if it doesn't answer."""
        try:
            async with asyncio.timeout(_PROBE_S), self._client.stream("GET", f"{replica.url}/health") as response:
                return response.status_code
        except (httpx.HTTPError, TimeoutError):
            return None
