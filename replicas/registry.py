# SPDX-License-Identifier: Apache-2.0
"""Registry of live replicas and the documents that each replica holds.

Its entries are hints: a wrong hint costs time, never a correct answer. Documents are identified by
:class:`DocumentKey`, which is computed from a request alone; their chunks and chunk keys are known only to a replica
with the model's tokenizer and chat template.
"""

import ipaddress
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Literal, NamedTuple, Protocol
from urllib.parse import urlsplit

import httpx
import msgspec

from cache.segments.holdings import DocumentKey, Holding

FILL_S: Final = 10.0
"""How long a replica's announcement that it computes a document keeps others from computing it."""


_IPV4_WITHIN: Final = (
    (ipaddress.IPv6Network("::/96"), 0),  # IPv4-compatible
    (ipaddress.IPv6Network("::ffff:0:0/96"), 0),  # IPv4-mapped
    (ipaddress.IPv6Network("::ffff:0:0:0/96"), 0),  # IPv4-translated
    (ipaddress.IPv6Network("64:ff9b::/96"), 0),  # NAT64
    (ipaddress.IPv6Network("2002::/16"), 80),  # 6to4
)
"""IPv6 networks that lead to IPv4 addresses, and by how many bits the IPv4 address is shifted in theirs."""
_NO_SERVERS: Final = (
    ipaddress.ip_network("255.255.255.255"),  # broadcast
    ipaddress.ip_network("64:ff9b:1::/48"),  # NAT64 of a network's own, any part of which may be an IPv4 address
    ipaddress.ip_network("100.100.100.200"),  # Alibaba's metadata
    ipaddress.ip_network("168.63.129.16"),  # Azure's
    ipaddress.ip_network("192.0.0.192"),  # Oracle's
    ipaddress.ip_network("fd00:ec2::254"),  # Amazon's
    ipaddress.ip_network("fd20:ce::254"),  # Google's
)
"""Addresses of no replica. Most clouds' metadata services are at link-local addresses; these are not."""
_MOST: Final = 1 << 63
"""Exclusive upper bound of a heartbeat's numbers: prices and exported metrics are floating point."""


class Claim(NamedTuple):
    """A claim that a document is held by ``holder``: a :attr:`Replica.id`, or one of :attr:`Replica.storages`."""

    holder: str
    holding: Holding


class Found(NamedTuple):
    """Claims on a document, and the :attr:`Replica.id` of the first replica to announce its computation."""

    claims: list[Claim]
    filler: str


Role = Literal["both", "prefill", "decode"]


@dataclass(frozen=True, slots=True)
class Replica:
    """One running replica, as its heartbeat describes it.

    ``id`` changes when claims under the previous id may be wrong; ``name`` stays. Only replicas with the same non-empty
    ``fingerprint`` exchange KV. ``load`` counts unfinished requests. ``role``: routers send no requests to replicas
    that ``prefill`` while others live; those that ``decode`` have them compute. ``hands_over``: it exchanges whole
    requests with other replicas. ``storages``: ids of the storage that it reads chunks from
    (:func:`replicas.storage.storage_ids`).
    """

    id: str
    name: str
    url: str
    models: tuple[str, ...]
    fingerprint: str
    load: int = 0
    held_tokens: int = 0
    capacity_tokens: int = 0
    role: Role = "both"
    hands_over: bool = False
    storages: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Fields for JSON."""
        return {**asdict(self), "models": list(self.models), "storages": list(self.storages)}

    @classmethod
    def from_dict(cls, fields: Any) -> "Replica":
        """Parses untrusted JSON; raises ``ValueError`` unless every field is present and valid."""
        try:
            replica = msgspec.convert(fields, cls)
        except msgspec.ValidationError as error:
            raise ValueError(f"not a replica: {fields!r}"[:200]) from error
        numbers = (replica.load, replica.held_tokens, replica.capacity_tokens)
        if set(fields) != set(cls.__slots__) or not all(0 <= number < _MOST for number in numbers):
            raise ValueError(f"not a replica: {fields!r}"[:200])
        # Names become HTTP headers, and every text appears in logs.
        texts = (replica.id, replica.name, replica.url, replica.fingerprint, *replica.models, *replica.storages)
        if not all(text.isprintable() for text in texts) or replica.name != replica.name.strip():
            raise ValueError(f"not printable: {fields!r}"[:200])
        return replace(replica, url=origin_of(replica.url))


def origin_of(text: str) -> str:
    """Return the URL of a server, to which paths are added; raise ``ValueError`` for any other.

    It has a scheme, a host and perhaps a port, and nothing else. Its host isn't link-local, where clouds keep secrets,
    in no way of writing it; nor is it unspecified, multicast or broadcast.
    """
    try:
        parts, url = urlsplit(text), httpx.URL(text)
        port = parts.port  # also checks the range
    except (httpx.InvalidURL, ValueError) as error:
        raise ValueError(f"not a URL: {text!r}"[:200]) from error
    if parts.scheme not in ("http", "https") or not url.host or port == 0:
        raise ValueError(f"not a URL: {text!r}"[:200])
    if url.userinfo or parts.path.rstrip("/") or parts.query or parts.fragment or {*"?#@\\ "} & {*text}:
        raise ValueError(f"more than scheme, host and port: {text!r}"[:200])
    if any(
        each.is_link_local
        or each.is_multicast
        or each.is_unspecified
        or any(each in network for network in _NO_SERVERS)
        for each in _addresses(url.host)
    ):
        raise ValueError(f"no server's address: {text!r}"[:200])
    host = f"[{url.host}]" if ":" in url.host else url.host
    return f"{parts.scheme}://{host}" + (f":{port}" if port is not None else "")


def _addresses(host: str) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """The address that a host is, also in forms that only the C library takes (2852039166), and any that is within it.

    Names have none.
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        try:
            return [ipaddress.IPv4Address(socket.inet_aton(host))]
        except (OSError, ValueError):
            return []
    within = [shift for network, shift in _IPV4_WITHIN if address in network]
    return [address, *(ipaddress.IPv4Address(int(address) >> shift & 0xFFFF_FFFF) for shift in within)]


class RegistryError(Exception):
    """The registry is unavailable; the message states the reason."""


class Registry(Protocol):
    """Interface of a registry. Every method raises :class:`RegistryError` within a bounded time."""

    async def beat(self, replica: Replica) -> bool:
        """Renews a replica's lease; returns False if the replica was unknown, and so were its claims."""

    async def leave(self, replica_id: str) -> None:
        """Removes a replica before its lease ends; its claims no longer count."""

    async def replicas(self) -> list[Replica]:
        """Replicas with a live lease, sorted by name."""

    async def publish(self, holder: str, changes: Mapping[DocumentKey, Holding | None]) -> None:
        """Updates what a replica or a storage holds of some documents; ``None`` removes a claim."""

    async def claims(self, keys: Sequence[DocumentKey]) -> list[list[Claim]]:
        """Known claims on each key; may name replicas that are gone. One round trip."""

    async def begin_fills(self, replica_id: str, keys: Sequence[DocumentKey]) -> list[Found]:
        """Known claims, as :meth:`claims`; also announces that ``replica_id`` computes each key not yet announced.

        An announcement ends with a claim on the key, and after :data:`FILL_S`. One round trip.
        """
