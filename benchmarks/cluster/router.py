# SPDX-License-Identifier: Apache-2.0
"""Routers, which know of replicas only what the registry says, and of loads what heartbeats say and what they sent.

Policies compared: ``rank`` is :func:`replicas.routing.rank` itself, and ``rank alone`` the same without any claims, as
while the registry is lost; ``hashing`` sends each set of documents to one replica by rendezvous; ``least load`` and
``round robin`` know nothing of documents.
"""

import random
from collections.abc import Callable, Sequence
from typing import Literal, Protocol, get_args

from app.cluster.router.in_flight import InFlight
from benchmarks.cluster.clock import Clock
from benchmarks.cluster.registry import SimulatedRegistry
from benchmarks.cluster.replica import Request
from benchmarks.cluster.workload import key_of
from benchmarks.eviction import Chunk
from replicas.registry import Replica
from replicas.routing import Candidate, Wanted, home_of, rank

PolicyName = Literal["rank", "rank alone", "hashing", "least load", "round robin"]
POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)

REFRESH_S = 1.0
"""How often a router asks who is there; as app/cluster/router/directory.py has it."""


class Policy(Protocol):
    """Chooses among at least one candidate."""

    def __call__(self, chunks: Sequence[Chunk], candidates: Sequence[Candidate]) -> Candidate: ...


def by_rank(registry: SimulatedRegistry | None) -> Policy:
    """Asks the registry, if there is one, for the documents' claims, and takes the first of the ranking."""

    def choose(chunks: Sequence[Chunk], candidates: Sequence[Candidate]) -> Candidate:
        keys = [key_of(chunk) for chunk in chunks]
        claims = registry.claims(keys) if registry is not None else [[] for _ in keys]
        wanted = [Wanted(key, chunk.tokens, found) for key, chunk, found in zip(keys, chunks, claims, strict=True)]
        return rank(wanted, candidates)[0].candidate

    return choose


def by_hash(chunks: Sequence[Chunk], candidates: Sequence[Candidate]) -> Candidate:
    """The home of all documents together, whatever their order."""
    digests = sorted(key_of(chunk).digest for chunk in chunks)
    return home_of(b"".join(digests), candidates) or candidates[0]


def by_load(rng: random.Random) -> Policy:
    """The least load; among equals by lot, or all routers would choose the same one."""

    def choose(chunks: Sequence[Chunk], candidates: Sequence[Candidate]) -> Candidate:
        least = min(candidate.load for candidate in candidates)
        return rng.choice([candidate for candidate in candidates if candidate.load == least])

    return choose


def by_turns(rng: random.Random) -> Policy:
    """One after another; each router begins somewhere else."""
    turn = rng.randrange(1 << 16)

    def choose(chunks: Sequence[Chunk], candidates: Sequence[Candidate]) -> Candidate:
        nonlocal turn
        turn += 1
        return candidates[turn % len(candidates)]

    return choose


def make_policy(name: PolicyName, registry: SimulatedRegistry, rng: random.Random) -> Policy:
    """A new policy for one router."""
    match name:
        case "rank":
            return by_rank(registry)
        case "rank alone":
            return by_rank(None)
        case "hashing":
            return by_hash
        case "least load":
            return by_load(rng)
        case "round robin":
            return by_turns(rng)


class Router:
    """Sends requests, and sends again what a replica leaves unfinished.

    ``deliver`` hands a request to a replica; False if nobody is there any more.
    """

    def __init__(
        self, clock: Clock, registry: SimulatedRegistry, policy: Policy, deliver: Callable[[str, Request], bool]
    ) -> None:
        self._clock, self._registry, self._policy, self._deliver = clock, registry, policy, deliver
        self._in_flight = InFlight(lambda: clock.now)
        self._heartbeats: dict[str, Replica] = {}
        self._candidates: dict[str, Candidate] = {}
        self._gone: set[str] = set()
        self._sent_to: dict[Request, str] = {}

    def start(self, phase: float, goes_on: Callable[[], bool]) -> None:
        """Asks who is there now, after a share ``phase`` of the interval, and then once in each while ``goes_on``."""
        self._refresh()
        self._repeat(self._refresh, REFRESH_S, phase * REFRESH_S, goes_on)

    def send(self, request: Request) -> None:
        """To the replica that the policy chooses; if nobody is known, later."""
        while self._candidates:
            chosen = self._policy(request.chunks, list(self._candidates.values())).id
            request.sendings += 1
            if self._deliver(chosen, request):
                self._sent_to[request] = chosen
                self._count(chosen, 1)
                return
            self.lost(chosen)
        self._clock.at(self._clock.now + REFRESH_S, self.send, request)

    def finished(self, request: Request) -> None:
        """A request that it sent has been answered."""
        self._count(self._sent_to.pop(request), -1)

    def lost(self, id: str) -> None:
        """A connection to a replica broke: it won't come back under this id."""
        self._gone.add(id)
        self._candidates.pop(id, None)

    def _refresh(self) -> None:
        self._heartbeats = {each.id: each for each in self._registry.replicas(self) if each.id not in self._gone}
        self._candidates = {id: self._candidate(id) for id in self._heartbeats}

    def _candidate(self, id: str) -> Candidate:
        heartbeat = self._heartbeats[id]
        return Candidate(id, heartbeat.name, self._in_flight.load(id, heartbeat.load))

    def _count(self, id: str, change: int) -> None:
        self._in_flight.add(id, change)
        if id in self._candidates:
            self._candidates[id] = self._candidate(id)

    def _repeat(self, action: Callable[[], None], every_s: float, after_s: float, goes_on: Callable[[], bool]) -> None:
        def step() -> None:
            if goes_on():
                action()
                self._clock.at(self._clock.now + every_s, step)

        self._clock.at(self._clock.now + after_s, step)
