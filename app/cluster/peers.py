# SPDX-License-Identifier: Apache-2.0
"""Fetches chunks from other replicas where fetching is faster than computing."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from typing import Final, NamedTuple

from cache.config import ChunkCacheConfig
from cache.costs import Costs
from cache.lease import ChunkStatus, FillJob
from cache.metrics import ChunkCacheMetrics
from cache.segments.holdings import DocumentKey, Tier
from cache.segments.index import ChunkKVCache
from engine_ext.chunks.source import SourceResult
from engine_ext.chunks.transfers import PoolTransfers, TransferError
from replicas.registry import Found, Registry, RegistryError, Replica

logger = logging.getLogger(__name__)

PATH: Final = "/peer/chunks/{key}"
FILL_PATH: Final = "/peer/fills"
MOST_AT_ONCE: Final = 8
"""Segments fetched concurrently, each held in a worker's memory as a whole."""
_POLL_S, _KNOWN_S, _LEAST_S = 0.05, 1.0, 0.01
_PUBLISHED_S = 0.25
"""Seconds at most until other replicas see a computed chunk in the registry."""


class Peers:
    """A :class:`engine_ext.chunks.source.ChunkSource`: replicas that hold a missing chunk, or are computing it.

    Waits for a chunk that another replica is computing, at most ``wait_s`` seconds and about twice the time that
    computing the chunk here would take. After any failure the chunk is computed.
    """

    def __init__(
        self,
        registry: Registry,
        own_id: Callable[[], str | None],
        config: ChunkCacheConfig,
        metrics: ChunkCacheMetrics,
        transfers: Callable[[], PoolTransfers | None],
        costs: Costs,
        secret: str,
        *,
        wait_s: float = 5.0,
        is_eager: bool = False,
    ) -> None:
        """``own_id`` returns ``None`` while the registry is lost, ``transfers`` once sharing has ended.

        ``secret`` signs the requests. ``is_eager``: fetches even where computing were faster.
        """
        self._registry = registry
        self._own_id = own_id
        self._config = config
        self._metrics = metrics
        self._transfers = transfers
        self._costs = costs
        self._wait_s = wait_s
        self._is_eager = is_eager
        self._secret = secret
        self._turns = asyncio.Semaphore(MOST_AT_ONCE)
        self._lookups = LookupBatcher(self._begin_fills)
        self._known: dict[str, Replica] = {}
        self._own_storages: set[str] = set()
        self._known_until = 0.0
        self._refreshing = asyncio.Lock()

    async def fetch(self, job: FillJob, documents: Mapping[ChunkKVCache, DocumentKey]) -> SourceResult | None:
        """Fills the job's entries from another replica, all or none."""
        keys = [documents[entry] for entry in job.entries if entry in documents]
        if len(keys) < len(job.entries) or self._transfers() is None:
            return None
        deadline = time.monotonic() + self._longest_wait(job)
        in_vain: set[str] = set()
        try:
            while True:
                found = await self._lookups.ask(keys)
                peers = await self.others()
                others = peers.keys() - in_vain
                holders = _holders_of_all(found, [peers[each] for each in others], self._own_storages)
                if holders and self._is_worth_it(job, holders[0].tier):
                    peer = peers[holders[0].id]
                    if await self.fetched(job, peer, deadline, holders[0].tier):
                        return SourceResult(ChunkStatus.FETCHED, origin=peer.name)
                    in_vain.add(peer.id)
                elif holders or not any(each.filler in others for each in found):
                    return None
                if time.monotonic() + _POLL_S > deadline:
                    self._count("late")
                    return None
                await asyncio.sleep(0 if holders else _POLL_S)
        except RegistryError:
            return None

    def _longest_wait(self, job: FillJob) -> float:
        computing = self._costs.computing.seconds(_tokens(job))
        return self._wait_s if computing is None else min(self._wait_s, 2 * computing + _PUBLISHED_S)

    def _is_worth_it(self, job: FillJob, tier: Tier) -> bool:
        return self._is_eager or self._costs.is_worth_fetching(tier, _tokens(job), self._bytes(job.entries))

    def _bytes(self, entries: Sequence[ChunkKVCache]) -> int:
        return self._config.page_bytes * sum(entry.num_pages for entry in entries)

    async def fetched(self, job: FillJob, peer: Replica, deadline: float, tier: Tier = Tier.DEVICE) -> bool:
        """Fetches all entries of ``job``, which ``peer`` has in ``tier`` or faster ones; False if that fails.

        It ends before ``deadline`` (monotonic).
        """
        if (transfers := self._transfers()) is None:
            return False
        started = time.perf_counter()
        async with asyncio.TaskGroup() as group:  # waits for all: pages that are written must not be reused
            fetches = [group.create_task(self._fetched_one(transfers, each, peer, deadline)) for each in job.entries]
        outcomes = set[str]().union(*(fetch.result() for fetch in fetches))
        num_bytes, seconds = self._bytes(job.entries), time.perf_counter() - started
        outcome = next(each for each in ("refused", "failed", "absent", "fetched") if each in outcomes)
        self._count(outcome)
        if outcome == "failed":  # perhaps it took too long
            self._costs.fetching[tier].given_up(num_bytes, seconds)
        elif outcome == "fetched":
            self._metrics.fetched_bytes += num_bytes
            self._costs.fetching[tier].observe(num_bytes, seconds)
        return outcome == "fetched"

    async def _fetched_one(
        self, transfers: PoolTransfers, entry: ChunkKVCache, peer: Replica, deadline: float
    ) -> set[str]:
        """The outcomes of all workers' fetches of a segment, or ``refused``."""
        url = peer.url + PATH.format(key=entry.key)
        async with self._turns:
            left = max(deadline - time.monotonic(), _LEAST_S)
            try:
                return {str(answer.fetched) for answer in await transfers.fetch(entry, url, self._secret, left)}
            except TransferError as error:
                logger.warning("chunks of replica %s are unusable: %s", peer.name, error)
                return {"refused"}

    async def others(self) -> dict[str, Replica]:
        """Other replicas with the same fingerprint, by id; at most a second old."""
        async with self._refreshing:
            if time.monotonic() >= self._known_until:
                mine, own_id = self._config.peer_fingerprint, self._own_id()
                replicas = await self._registry.replicas()
                self._known = {each.id: each for each in replicas if each.fingerprint == mine and each.id != own_id}
                self._own_storages = {name for each in replicas if each.id == own_id for name in each.storages}
                self._known_until = time.monotonic() + _KNOWN_S
        return self._known

    async def _begin_fills(self, keys: Sequence[DocumentKey]) -> list[Found]:
        if (own_id := self._own_id()) is None:
            raise RegistryError("the registry is lost")
        return await self._registry.begin_fills(own_id, keys)

    def _count(self, outcome: str) -> None:
        self._metrics.fetches[outcome] += 1


class LookupBatcher:
    """Batches concurrent look-ups into one round trip."""

    def __init__(self, look_up: Callable[[Sequence[DocumentKey]], Awaitable[list[Found]]]) -> None:
        self._look_up = look_up
        self._keys: dict[DocumentKey, None] = {}
        self._next: asyncio.Task[dict[DocumentKey, Found]] | None = None

    async def ask(self, keys: Sequence[DocumentKey]) -> list[Found]:
        """Looks the keys up, together with all that are asked for now."""
        self._keys.update(dict.fromkeys(keys))
        if self._next is None:
            self._next = asyncio.create_task(self._run())
        found = await asyncio.shield(self._next)
        return [found[key] for key in keys]

    async def _run(self) -> dict[DocumentKey, Found]:
        await asyncio.sleep(0)  # lets others add their keys
        keys, self._keys, self._next = list(self._keys), {}, None
        return dict(zip(keys, await self._look_up(keys), strict=True))


class _Holder(NamedTuple):
    """A replica that has all that is missing, and the slowest tier that has a part of it."""

    tier: Tier
    id: str


def _holders_of_all(found: Sequence[Found], peers: Sequence[Replica], own_storages: Set[str]) -> list[_Holder]:
    """Peers that hold all of the documents, or read them from storage that this replica doesn't; the fastest first."""
    holders = []
    for peer in peers:
        places = {peer.id, *peer.storages} - own_storages
        tiers = [min((c.holding.tier for c in each.claims if c.holder in places), default=None) for each in found]
        known = [tier for tier in tiers if tier is not None]
        if len(known) == len(tiers):
            holders.append(_Holder(max(known), peer.id))
    return sorted(holders)


def _tokens(job: FillJob) -> int:
    return sum(entry.identity.num_tokens for entry in job.entries)
