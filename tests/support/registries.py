# SPDX-License-Identifier: Apache-2.0
"""A registry without Redis."""

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence

from cache.segments.holdings import DocumentKey, Holding
from replicas.registry import FILL_S, Claim, Found, Replica


class InProcessRegistry:
    """A registry within one process; claims and heartbeats don't expire."""

    def __init__(self) -> None:
        self._replicas: dict[str, Replica] = {}
        self._claims: defaultdict[DocumentKey, dict[str, Holding]] = defaultdict(dict)
        self._fillers: dict[DocumentKey, tuple[str, float]] = {}

    async def beat(self, replica: Replica) -> bool:
        is_known = replica.id in self._replicas
        self._replicas[replica.id] = replica
        return is_known

    async def leave(self, replica_id: str) -> None:
        self._replicas.pop(replica_id, None)

    async def replicas(self) -> list[Replica]:
        return sorted(self._replicas.values(), key=lambda replica: replica.name)

    async def publish(self, holder: str, changes: Mapping[DocumentKey, Holding | None]) -> None:
        for key, holding in changes.items():
            if holding is not None:
                self._claims[key][holder] = holding
                self._fillers.pop(key, None)
            elif (holders := self._claims.get(key)) is not None:
                holders.pop(holder, None)
                if not holders:
                    del self._claims[key]

    async def claims(self, keys: Sequence[DocumentKey]) -> list[list[Claim]]:
        return [[Claim(*item) for item in self._claims.get(key, {}).items()] for key in keys]

    async def begin_fills(self, replica_id: str, keys: Sequence[DocumentKey]) -> list[Found]:
        now = time.monotonic()
        self._fillers = {key: said for key, said in self._fillers.items() if said[1] > now}
        fillers = [self._fillers.setdefault(key, (replica_id, now + FILL_S))[0] for key in keys]
        return list(map(Found, await self.claims(keys), fillers))
