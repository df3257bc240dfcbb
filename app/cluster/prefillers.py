# SPDX-License-Identifier: Apache-2.0
"""Missing chunks computed by replicas that prefill, for one that decodes."""

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any, Final

import httpx

from app.cluster.peers import FILL_PATH, Peers
from cache.lease import ChunkStatus, FillJob
from cache.segments.holdings import DocumentKey
from cache.segments.index import ChunkKVCache
from engine_ext.chunks.source import SourceResult
from engine_ext.wire.peer_fill import PeerFill
from replicas.registry import RegistryError, Replica
from replicas.routing import Candidate, Wanted, rank

logger = logging.getLogger(__name__)

_LOOK_S: Final = 1.0
_FETCH_S: Final = 30.0
_MOST_ATTEMPTS: Final = 2


class Prefillers:
    """A :class:`engine_ext.chunks.source.ChunkSource`: computes anything, as long as a replica that prefills lives.

    The same segment goes to the same replica, so that it is computed once, unless that one has more to do.
    """

    def __init__(self, peers: Peers, client: httpx.AsyncClient) -> None:
        """``client`` signs its requests, and sends the fingerprint."""
        self._peers = peers
        self._client = client

    async def fetch(self, job: FillJob, documents: Mapping[ChunkKVCache, DocumentKey]) -> SourceResult | None:
        """Has the job's entries computed, and fetches them."""
        fill, key = PeerFill.of_job(job, documents).to_dict(), job.entries[-1].key
        for replica in (await self._ranked(DocumentKey(key.digest), job.num_tokens))[:_MOST_ATTEMPTS]:
            if await self._has_computed(replica, fill) and await self._peers.fetched(
                job, replica, time.monotonic() + _FETCH_S
            ):
                return SourceResult(ChunkStatus.FETCHED, origin=replica.name)
        return None

    async def _ranked(self, key: DocumentKey, num_tokens: int) -> list[Replica]:
        """The live replicas that prefill, the best for this work first."""
        replicas = await self._alive()
        candidates = [Candidate(each.id, each.name, each.load) for each in replicas.values()]
        return [replicas[each.candidate.id] for each in rank([Wanted(key, num_tokens)], candidates)]

    async def _has_computed(self, replica: Replica, fill: dict[str, Any]) -> bool:
        """Waits for ``replica``, however long it takes; False if it refuses or is no longer alive."""
        asking = asyncio.create_task(self._client.post(replica.url + FILL_PATH, json=fill))
        try:
            while not (await asyncio.wait({asking}, timeout=_LOOK_S))[0]:
                if replica.id not in await self._alive():
                    logger.warning("replica %s, which prefills, is gone", replica.name)
                    return False
            asking.result().raise_for_status()
            return True
        except httpx.HTTPError as error:
            logger.warning("replica %s, which prefills: %s: %s", replica.name, type(error).__name__, error)
            return False
        finally:
            asking.cancel()

    async def _alive(self) -> dict[str, Replica]:
        try:
            return {id: each for id, each in (await self._peers.others()).items() if each.role == "prefill"}
        except RegistryError:
            return {}
