# SPDX-License-Identifier: Apache-2.0
"""Registry in Redis 7 or Valkey, for replicas and routers on many machines.

Keys, behind :data:`PREFIX`: ``replicas``, a set of replica ids; ``r:<id>``, a heartbeat as JSON, sealed if there is a
peers' secret, that expires with its lease; ``d:<digest>``, a hash of claims, from the id of a replica or a storage to
tier and tokens, in binary for Redis to pack; ``f:<digest>``, the id of the replica that computes a document,
short-lived. Claims outlive their replicas, but readers ignore claims without a heartbeat, and the keys expire. Claims
are not sealed: a false one sends a request to another live replica, or asks it in vain. Clusters that share a Redis
have a database each.
"""

import asyncio
import json
import logging
import struct
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, cast
from urllib.parse import unquote, urlsplit

from redis.asyncio import Redis
from redis.asyncio.client import Pipeline
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import OutOfMemoryError, ReadOnlyError, RedisError

from cache.segments.holdings import DocumentKey, Holding, Tier
from replicas.registry import FILL_S, Claim, Found, RegistryError, Replica
from replicas.signing import PeerKey, unverified

logger = logging.getLogger(__name__)

PREFIX = b"tessera:"
_PURPOSE = "heartbeat"
MOST_BYTES = 1 << 17
"""Of a heartbeat: it may name thousands of adapters, and is parsed by routers every second, in their event loop."""
MOST_REPLICAS = 1024
"""That are listed. Redis may name any number, which the reader would ask, and choose among for each request."""
CLAIM_TTL_S = 3600
"""Lifetime of a claim that its replica does not repeat."""
BATCH = 500
"""Documents per round trip of :meth:`RedisRegistry.publish`."""
_WRONG_TYPE = "WRONGTYPE"
"""How Redis begins to say that a key has another type than a command is for."""
_SENTINEL: Final = "+sentinel"
"""Behind the scheme of URLs that name sentinels: ``redis+sentinel://host:26379,other:26379/primary/0``."""
_SENTINEL_PORT: Final = 26379
_HOLDING = struct.Struct("<I")
_TIER_BITS = 2


class RedisRegistry:
    """A :class:`replicas.registry.Registry`; each round trip takes at most ``timeout_s``.

    A replica without a heartbeat for ``lease_s`` counts as gone.
    """

    def __init__(self, url: str, key: PeerKey | None = None, *, timeout_s: float = 0.1, lease_s: float = 5.0) -> None:
        """Connects on first use. Raises ``ValueError`` for a URL that is not a Redis URL, or names no sentinels.

        ``key`` seals heartbeats, and those that it hasn't sealed are ignored; without it, any are believed.
        """
        self.num_invalid = 0
        """Malformed or unsigned entries ignored so far."""
        self._key = key
        self._timeout_s = timeout_s
        self._lease_ms = int(lease_s * 1000)
        self._ids: tuple[bytes, ...] = ()
        self._listed: Collection[bytes] = ()
        # Without timeouts of its own: with them the client awaits asyncio.wait_for, which in Python 3.11 may swallow a
        # cancellation, so that a server would not stop. `_round_trip` limits the time.
        options: dict[str, Any] = {
            "retry": Retry(NoBackoff(), 0),
            "socket_timeout": None,
            "socket_connect_timeout": None,
        }
        self._sentinel, primary = _sentinel_of(url, options)
        self._redis = Redis.from_url(url, **options) if self._sentinel is None else self._sentinel.master_for(primary)

    async def close(self) -> None:
        """Closes all connections."""
        await self._redis.aclose()
        for each in self._sentinel.sentinels if self._sentinel is not None else ():
            await each.aclose()

    async def beat(self, replica: Replica) -> bool:
        heartbeat = self._heartbeat(replica.id.encode())
        async with self._round_trip(transaction=True) as pipe:
            pipe.exists(heartbeat)
            pipe.set(heartbeat, self._sealed(json.dumps(replica.to_dict()).encode()), px=self._lease_ms)
            pipe.sadd(self._replicas, replica.id)
            known, *_ = await self._executed(pipe)
        return bool(known)

    async def leave(self, replica_id: str) -> None:
        async with self._round_trip(transaction=True) as pipe:
            pipe.delete(self._heartbeat(replica_id.encode()))
            pipe.srem(self._replicas, replica_id)
            await self._executed(pipe)

    async def replicas(self) -> list[Replica]:
        """At most :data:`MOST_REPLICAS`; who is listed stays so while its heart beats."""
        ids = self._ids  # other calls may change them meanwhile
        members, heartbeats = await self._heartbeats_of(ids)
        if members != set(ids):  # changed since the last call, or more than are listed
            living = [id for id in ids if heartbeats[id] is not None and id in self._listed]
            self._ids = ids = tuple(dict.fromkeys([*living, *sorted(members)]))[:MOST_REPLICAS]
            _, heartbeats = await self._heartbeats_of(ids)
        if gone := [id for id, value in heartbeats.items() if value is None]:
            async with self._round_trip() as pipe:
                pipe.srem(self._replicas, *gone)
                await self._executed(pipe)
        found = {}
        for id, value in heartbeats.items():
            if value is not None and (replica := self._replica(id, value)) is not None:
                found[id] = replica
            await asyncio.sleep(0)  # of many, others go on between them
        self._listed = found.keys()
        return sorted(found.values(), key=lambda replica: replica.name)

    async def _heartbeats_of(self, ids: tuple[bytes, ...]) -> tuple[set[bytes], dict[bytes, bytes | None]]:
        """Replica ids, all or a random choice of so many, and the heartbeats of ``ids``. One round trip."""
        async with self._round_trip() as pipe:
            pipe.srandmember(self._replicas, MOST_REPLICAS)
            if ids:
                pipe.mget([self._heartbeat(id) for id in ids])
            members, *values = await self._executed(pipe)
            return set(map(_binary, members)), {
                id: None if value is None else _binary(value) for id, value in zip(ids, *(values or [()]), strict=True)
            }

    async def publish(self, holder: str, changes: Mapping[DocumentKey, Holding | None]) -> None:
        field, items = bytes.fromhex(holder), list(changes.items())
        for start in range(0, len(items), BATCH):
            async with self._round_trip() as pipe:
                for document, holding in items[start : start + BATCH]:
                    key = self._claims(document)
                    if holding is None:
                        pipe.hdel(key, field)
                    else:
                        pipe.hset(key, field, _HOLDING.pack(holding.tokens << _TIER_BITS | holding.tier))
                        pipe.expire(key, CLAIM_TTL_S)
                        pipe.delete(self._filler(document))
                await self._executed(pipe)

    async def claims(self, keys: Sequence[DocumentKey]) -> list[list[Claim]]:
        if not keys:
            return []
        async with self._round_trip() as pipe:
            for document in keys:
                pipe.hgetall(self._claims(document))
            return [self._parsed(fields) for fields in await self._executed(pipe)]

    async def begin_fills(self, replica_id: str, keys: Sequence[DocumentKey]) -> list[Found]:
        if not keys:
            return []
        async with self._round_trip() as pipe:
            for document in keys:
                pipe.hgetall(self._claims(document))
                pipe.set(self._filler(document), replica_id, nx=True, get=True, px=int(FILL_S * 1000))
            found = await self._executed(pipe, tolerated=(OutOfMemoryError,))
            earlier = [each.decode(errors="replace") if isinstance(each, bytes) else replica_id for each in found[1::2]]
            return list(map(Found, map(self._parsed, found[::2]), earlier))

    async def _executed(self, pipe: Pipeline, tolerated: tuple[type[RedisError], ...] = ()) -> list[Any]:
        """The answers to a pipeline's commands; raises an error among them, unless it is ``tolerated``.

        A key of another type than ours is a stranger's. It is removed, and the commands for it are sent again: it could
        keep all replicas from the registry. If it comes back at once, it is left to the next call.
        """
        commands = pipe.command_stack
        answers = await pipe.execute(raise_on_error=False)
        if foreign := [place for place, answer in enumerate(answers) if _is_of_wrong_type(answer)]:
            keys = {cast("bytes", commands[place][0][1]) for place in foreign}
            self.num_invalid += len(keys)
            kinds = ", ".join(sorted(set(map(_kind, keys))))
            logger.warning("keys of another type than ours were in Redis, and are removed: %d of %s", len(keys), kinds)
            pipe.delete(*keys)
            for place in foreign:
                args, options = commands[place]
                pipe.execute_command(*args, **options)
            _, *again = await pipe.execute(raise_on_error=False)
            for place, answer in zip(foreign, again, strict=True):
                answers[place] = answer
        for answer in answers:
            if isinstance(answer, RedisError) and not isinstance(answer, tolerated) and not _is_of_wrong_type(answer):
                raise answer
        return answers

    def _sealed(self, heartbeat: bytes) -> bytes:
        return heartbeat if self._key is None else self._key.seal(_PURPOSE, heartbeat)

    def _unsealed(self, value: bytes) -> bytes:
        return unverified(value) if self._key is None else self._key.unseal(_PURPOSE, value)

    def _replica(self, id: bytes, value: bytes) -> Replica | None:
        try:
            if len(value) > MOST_BYTES:
                raise ValueError("too long for a heartbeat")
            replica = Replica.from_dict(json.loads(self._unsealed(value)))
            if replica.id.encode() == id and bytes.fromhex(replica.id).hex() == replica.id != "":
                return replica
        except (ValueError, RecursionError):
            pass
        self.num_invalid += 1
        return None

    def _parsed(self, fields: Any) -> list[Claim]:
        if not isinstance(fields, dict):
            self.num_invalid += 1
            return []
        claims = []
        for holder, value in fields.items():
            try:
                claims.append(Claim(holder.hex(), _unpacked(value)))
            except (struct.error, ValueError):
                self.num_invalid += 1
        return claims

    @asynccontextmanager
    async def _round_trip(self, *, transaction: bool = False) -> "AsyncIterator[Pipeline]":
        """Commands, and the decoding of their answers, within the context; whatever fails is a ``RegistryError``."""
        try:
            async with asyncio.timeout(self._timeout_s), self._redis.pipeline(transaction=transaction) as pipe:
                yield pipe
        except TimeoutError as error:
            if self._sentinel is not None:  # perhaps it is the first of them that hangs
                self._sentinel.sentinels.append(self._sentinel.sentinels.pop(0))
            raise RegistryError(f"Redis did not answer within {self._timeout_s:g} s") from error
        except ReadOnlyError as error:
            # The primary has become a replica: new connections find the new one.
            await self._redis.connection_pool.disconnect(inuse_connections=False)
            raise RegistryError(f"Redis: {error}") from error
        except (RedisError, OSError) as error:
            raise RegistryError(f"Redis: {error}") from error
        except Exception as error:  # of any type: another server's answer, which the client or we can't make sense of
            raise RegistryError(f"what answers is no Redis, or an odd one: {error!r}"[:200]) from error

    @property
    def _replicas(self) -> bytes:
        return PREFIX + b"replicas"

    def _heartbeat(self, id: bytes) -> bytes:
        return PREFIX + b"r:" + id

    def _claims(self, document: DocumentKey) -> bytes:
        return PREFIX + b"d:" + document.digest

    def _filler(self, document: DocumentKey) -> bytes:
        return PREFIX + b"f:" + document.digest


def _sentinel_of(url: str, options: dict[str, Any]) -> tuple[Sentinel | None, str]:
    """The sentinels that a URL names, and the name of the primary that they watch; none for other URLs.

    Name and password in the URL are Redis's; ``rediss+sentinel`` speaks TLS with it and the sentinels.
    """
    parts = urlsplit(url)
    if not parts.scheme.endswith(_SENTINEL):
        return None, ""
    credentials, _, hosts = parts.netloc.rpartition("@")
    name, _, database = parts.path.strip("/").partition("/")
    username, _, password = map(unquote, credentials.partition(":"))
    addresses = [urlsplit(f"//{host}") for host in hosts.split(",")]
    is_known = parts.scheme.removesuffix(_SENTINEL) in ("redis", "rediss")
    if not is_known or not name or not all(each.hostname for each in addresses):
        raise ValueError("sentinels are given as redis+sentinel://HOST:26379,HOST:26379/NAME-OF-THE-PRIMARY/0")
    if parts.scheme.startswith("rediss"):
        options = {**options, "ssl": True}
    sentinel = Sentinel(  # type: ignore[no-untyped-call]
        [(str(each.hostname), each.port or _SENTINEL_PORT) for each in addresses],
        sentinel_kwargs=options,
        **options,
        username=username or None,
        password=password or None,
        db=int(database or 0),
    )
    return sentinel, name


def _is_of_wrong_type(answer: Any) -> bool:
    return isinstance(answer, RedisError) and str(answer).startswith(_WRONG_TYPE)


def _kind(key: bytes) -> str:
    """A key without what it is of, for the log: ``d``."""
    return key.removeprefix(PREFIX).partition(b":")[0].decode()


def _binary(value: Any) -> bytes:
    if not isinstance(value, bytes):
        raise TypeError(f"{type(value).__name__} in place of bytes")
    return value


def _unpacked(value: bytes) -> Holding:
    """Raises ``struct.error`` or ``ValueError``."""
    tokens, tier = divmod(_HOLDING.unpack(value)[0], 1 << _TIER_BITS)
    return Holding(Tier(tier), tokens)
