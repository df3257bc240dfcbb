# SPDX-License-Identifier: Apache-2.0
"""What replicas tell one another: who is there, and which documents each of them holds.

A registry has hints, never truth: whoever believes a wrong one loses time, and never gives a wrong answer. Documents go
by :class:`DocumentKey`, which anybody can compute from a request alone; the chunks that they become, and the keys of
those, are known only to a replica with the model's tokenizer and chat template.
"""

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, NamedTuple, Protocol
from urllib.parse import urlsplit

import httpx

from cache.segments.holdings import DocumentKey, Holding

FILL_S: Final = 10.0
"""How long a replica that has said that it computes a document keeps others from doing so."""


_MOST: Final = 1 << 63
"""Numbers of a heartbeat are smaller: prices are reckoned in floating point, and metrics are exported so."""


class Claim(NamedTuple):
    """A replica's word that it holds a document. ``replica`` is its :attr:`Replica.id`."""

    replica: str
    holding: Holding


class Found(NamedTuple):
    """Who holds a document, and the :attr:`Replica.id` of who said first that it computes it, unless long ago."""

    claims: list[Claim]
    filler: str


@dataclass(frozen=True, slots=True)
class Replica:
    """One running replica, as its heartbeat describes it.

    ``id`` is new whenever claims made under the one before may be wrong; ``name`` stays. Only replicas of equal
    ``fingerprint`` may exchange KV, and those that have none never do. ``load`` counts unfinished requests.
    """

    id: str
    name: str
    url: str
    models: tuple[str, ...]
    fingerprint: str
    load: int = 0
    held_tokens: int = 0
    capacity_tokens: int = 0

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {**asdict(self), "models": list(self.models)}

    @classmethod
    def from_dict(cls, fields: Any) -> "Replica":
        """From JSON, whoever wrote it; raises ``ValueError`` unless every field is there and right."""
        if not isinstance(fields, dict) or set(fields) != set(cls.__slots__):
            raise ValueError(f"not a replica: {fields!r}"[:200])
        texts = [fields[name] for name in ("id", "name", "url", "fingerprint")]
        numbers = [fields[name] for name in ("load", "held_tokens", "capacity_tokens")]
        models = fields["models"]
        if not isinstance(models, list) or not all(isinstance(text, str) for text in [*texts, *models]):
            raise ValueError(f"not a replica: {fields!r}"[:200])
        if any(type(number) is not int or not 0 <= number < _MOST for number in numbers):
            raise ValueError(f"not a replica: {fields!r}"[:200])
        # Names become headers, and all of them lines of a log.
        if not all(text.isprintable() for text in [*texts, *models]) or fields["name"] != fields["name"].strip():
            raise ValueError(f"not printable: {fields!r}"[:200])
        _check_url(fields["url"])
        return cls(**{**fields, "models": tuple(models)})


def _check_url(text: str) -> None:
    """Raises ``ValueError`` unless requests can be sent there, or fail as requests do."""
    try:
        parts, url = urlsplit(text), httpx.URL(text)
    except httpx.InvalidURL as error:
        raise ValueError(f"not a URL: {text!r}"[:200]) from error
    if parts.scheme not in ("http", "https") or not url.host or parts.port == 0:  # the port's range is checked, too
        raise ValueError(f"not a URL: {text!r}"[:200])


class RegistryError(Exception):
    """The registry can't be asked, or told, now; the message says why."""


class Registry(Protocol):
    """Where replicas publish. Every method raises :class:`RegistryError` after a bounded time."""

    async def beat(self, replica: Replica) -> bool:
        """Says that ``replica`` is there, for as long as its lease goes.

        False if the registry knew nothing of it: then it has none of its claims either.
        """

    async def leave(self, replica_id: str) -> None:
        """Says that a replica is gone, before its lease ends; its claims count no more."""

    async def replicas(self) -> list[Replica]:
        """The replicas whose lease goes on, by name."""

    async def publish(self, replica_id: str, changes: Mapping[DocumentKey, Holding | None]) -> None:
        """What a replica holds now of some documents; ``None``: nothing any more."""

    async def claims(self, keys: Sequence[DocumentKey]) -> list[list[Claim]]:
        """For each key who holds it, as far as known; replicas that are gone may still be named. One round trip."""

    async def begin_fills(self, replica_id: str, keys: Sequence[DocumentKey]) -> list[Found]:
        """The same, and says of each key that ``replica_id`` will compute it, unless another has said so before.

        That is forgotten when somebody claims to hold it, and after :data:`FILL_S`. One round trip.
        """


class InProcessRegistry:
    """A registry for whoever lives in one process; claims and heartbeats don't expire."""

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

    async def publish(self, replica_id: str, changes: Mapping[DocumentKey, Holding | None]) -> None:
        for key, holding in changes.items():
            if holding is not None:
                self._claims[key][replica_id] = holding
                self._fillers.pop(key, None)
            elif (holders := self._claims.get(key)) is not None:
                holders.pop(replica_id, None)
                if not holders:
                    del self._claims[key]

    async def claims(self, keys: Sequence[DocumentKey]) -> list[list[Claim]]:
        return [[Claim(*item) for item in self._claims.get(key, {}).items()] for key in keys]

    async def begin_fills(self, replica_id: str, keys: Sequence[DocumentKey]) -> list[Found]:
        now = time.monotonic()
        self._fillers = {key: said for key, said in self._fillers.items() if said[1] > now}
        fillers = [self._fillers.setdefault(key, (replica_id, now + FILL_S))[0] for key in keys]
        return list(map(Found, await self.claims(keys), fillers))
