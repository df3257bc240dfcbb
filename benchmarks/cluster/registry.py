# SPDX-License-Identifier: Apache-2.0
"""The registry as :class:`replicas.redis_registry.RedisRegistry` is seen from outside, in memory and synthetic time.

It counts what Redis would be asked: commands, and round trips, since commands of one pipeline travel together.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.cluster.clock import Clock
from replicas.registry import Claim, DocumentKey, Holding, Replica

FLUSH_S, BEAT_S, LEASE_S = 0.1, 1.0, 5.0
"""As replicas/publisher.py and replicas/redis_registry.py have them."""
BATCH = 500
TRANSACTION = 2
"""Commands around a transaction: MULTI and EXEC."""


@dataclass(slots=True)
class Traffic:
    """What Redis was asked."""

    commands: int = 0
    round_trips: int = 0

    def add(self, commands: int, round_trips: int = 1) -> None:
        """Counts one call."""
        self.commands += commands
        self.round_trips += round_trips


class SimulatedRegistry:
    """Claims stay when their replica has gone, and count no more.

    ``lookups`` is the part of ``all`` that asks for claims. Unless somebody ``takes_claims``, nobody publishes any.
    """

    def __init__(self, clock: Clock, *, takes_claims: bool = True) -> None:
        self.all, self.lookups = Traffic(), Traffic()
        self._clock, self._takes_claims = clock, takes_claims
        self._leases: dict[str, tuple[float, Replica]] = {}
        self._ids: dict[object, frozenset[str]] = {}
        self._claims: defaultdict[DocumentKey, dict[str, Claim]] = defaultdict(dict)

    def forget_traffic(self) -> tuple[Traffic, Traffic]:
        """Counts from now; returns ``all`` and ``lookups`` so far."""
        counted = self.all, self.lookups
        self.all, self.lookups = Traffic(), Traffic()
        return counted

    def beat(self, replica: Replica) -> None:
        self.all.add(3 + TRANSACTION)
        self._leases[replica.id] = (self._clock.now + LEASE_S, replica)

    def replicas(self, asker: object = None) -> list[Replica]:
        self.all.add(2)
        gone = [id for id, (until, _) in self._leases.items() if until < self._clock.now]
        for id in gone:
            del self._leases[id]
        if gone:
            self.all.add(1)
        if (ids := frozenset(self._leases)) != self._ids.get(asker):  # who asks has to ask again for the heartbeats
            self._ids[asker] = ids
            self.all.add(2)
        return sorted((replica for _, replica in self._leases.values()), key=lambda replica: replica.name)

    def publish(self, replica_id: str, changes: Mapping[DocumentKey, Holding | None]) -> None:
        if not self._takes_claims:
            return
        for key, holding in changes.items():
            if holding is not None:
                self.all.commands += 3
                self._claims[key][replica_id] = Claim(replica_id, holding)
                continue
            self.all.commands += 1
            if (holders := self._claims.get(key)) is not None:
                holders.pop(replica_id, None)
                if not holders:
                    del self._claims[key]
        self.all.round_trips += -(-len(changes) // BATCH)

    def claims(self, keys: Sequence[DocumentKey]) -> list[list[Claim]]:
        for traffic in (self.all, self.lookups):
            traffic.add(len(keys))
        return [list(self._claims[key].values()) if key in self._claims else [] for key in keys]

    def num_claims(self) -> tuple[int, int]:
        """Claims that it has, and how many of them are of replicas whose lease goes on."""
        living = {id for id, (until, _) in self._leases.items() if until >= self._clock.now}
        holders = [id for claims in self._claims.values() for id in claims]
        return len(holders), sum(id in living for id in holders)
