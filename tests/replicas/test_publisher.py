# SPDX-License-Identifier: Apache-2.0
"""A replica that publishes its holdings to a real Redis, through all its failures."""

import asyncio
from contextlib import contextmanager, suppress
from dataclasses import replace

import pytest

from cache.segments.holdings import Holding, Holdings, Tier
from cache.segments.index import EntryState
from replicas import publisher as publisher_module
from replicas.publisher import Publisher
from replicas.redis_registry import RedisRegistry
from replicas.registry import Claim, RegistryError
from tests.cache.helpers import entry_of, key, replica
from tests.support.virtual_time import virtual_time
from tests.support.waiting import eventually


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(publisher_module, "BEAT_S", 0.2)
    monkeypatch.setattr(publisher_module, "FLUSH_S", 0.02)


class Running:
    """A running publisher, and its state in the registry."""

    def __init__(self, redis_server):
        self.registry = RedisRegistry(redis_server.url, timeout_s=1, lease_s=4)
        self.holdings = Holdings()
        self.takes_requests = True
        self.storages = ()
        self.publisher = Publisher(self.registry, self.describe, self.holdings)

    def describe(self, id):
        return replica(1, id=id, storages=self.storages) if self.takes_requests else None

    async def __aenter__(self):
        self.task = asyncio.create_task(self.publisher.run())
        return self

    async def __aexit__(self, *_):
        self.task.cancel()
        with suppress(asyncio.CancelledError):
            await self.task
        self.left = await self.registry.replicas() if self.publisher.is_up else None
        await self.registry.close()

    async def seen(self, *documents):
        """Tokens that a live replica claims of each document."""
        alive = {each.id for each in await self.registry.replicas()}
        found = await self.registry.claims(documents)
        return [sum(claim.holding.tokens for claim in claims if claim.holder in alive) for claims in found]

    async def until(self, documents, tokens):
        async def is_seen():
            with suppress(RegistryError):
                return await self.seen(*documents) == tokens

        await eventually(is_seen)


async def test_documents_are_claimed_while_they_are_held_and_the_replica_takes_requests(redis_server):
    async with Running(redis_server) as running:
        entries = [entry_of(number, tokens=10 * number) for number in (1, 2)]
        for number, entry in enumerate(entries, 1):
            running.holdings.add(key(number), entry)
        await running.until([key(1), key(2)], [10, 20])
        running.holdings.removed(entries[0].key)
        await running.until([key(1), key(2)], [0, 20])
        redis_server.client.flushall()  # it is told everything again
        await running.until([key(1), key(2)], [0, 20])
        assert running.publisher.num_errors == 0
        running.takes_requests = False  # it stops, and leaves while it still runs
        await running.until([key(2)], [0])
    assert running.left == []


@contextmanager
def lost(redis_server, fault):
    if fault == "stopped":
        redis_server.stop()
        yield
        redis_server.start()
    else:
        with redis_server.frozen() if fault == "frozen" else redis_server.configured(maxmemory="1"):
            yield


@pytest.mark.parametrize("fault", ["stopped", "frozen", "full"])
async def test_what_changed_while_redis_was_lost_is_right_afterwards(redis_server, fault):
    async with Running(redis_server) as running:
        old, new = entry_of(1), entry_of(2, tokens=20)
        running.holdings.add(key(1), old)
        await running.until([key(1)], [10])
        with lost(redis_server, fault):
            await eventually(lambda: not running.publisher.is_up)
            running.holdings.removed(old.key)
            running.holdings.add(key(2), new)
            await asyncio.sleep(0.5)
        await running.until([key(1), key(2)], [0, 20])
        assert len(await running.registry.replicas()) == 1
        assert running.publisher.num_errors > 0
    assert running.left == []


class Between:
    """Stands between a registry and Redis. Passes everything on, or gives an ``answer`` of its own instead.

    An empty answer closes the connection; silence is :data:`SILENCE`.
    """

    def __init__(self, redis_server):
        self.port = redis_server.port
        self.answer = None

    async def __aenter__(self):
        self.server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        self.url = f"redis://127.0.0.1:{self.server.sockets[0].getsockname()[1]}/0"
        return self

    async def __aexit__(self, *_):
        self.server.close()

    async def serve(self, reader, writer):
        redis_reader, redis_writer = await asyncio.open_connection("127.0.0.1", self.port)
        passing = asyncio.create_task(pass_on(redis_reader, writer))
        with suppress(OSError):
            while (asked := await reader.read(1 << 16)) and self.answer != b"":
                if self.answer is None:
                    redis_writer.write(asked)
                elif self.answer is not SILENCE:
                    writer.write(self.answer)
        passing.cancel()
        for each in (writer, redis_writer):
            each.close()


async def pass_on(reader, writer):
    with suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)


SILENCE = object()
FALSE = {
    "silence": SILENCE,
    "closed": b"",
    "half": b"$1000\r\nhalf",
    "null": b"$-1\r\n" * 9,
    "text": b"+OK\r\n" * 9,
    "number": b":1\r\n" * 9,
    "list": b"*0\r\n" * 9,
    "no list": b"*-1\r\n" * 9,
    "nested": b"*1\r\n" * 100_000,
    "length": b"$99999999999999999999\r\n",
    "no length": b"$x\r\n*x\r\n",
    "no number": b":x\r\n" * 9,
    "RESP3": b"%1\r\n+a\r\n~1\r\n>1\r\n#t\r\n" * 3,
    "binary": bytes(range(256)) * 9,
    "HTTP": b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n",
    "read-only": b"-READONLY You can't write against a read only replica.\r\n" * 9,
    "loading": b"-LOADING Redis is loading the dataset in memory\r\n" * 9,
    "moved": b"-MOVED 1 127.0.0.1:1\r\n" * 9,
    "locked": b"-NOAUTH Authentication required.\r\n" * 9,
    "wrong type": b"-WRONGTYPE Operation against a key holding the wrong kind of value\r\n" * 9,
    "odd error": b"-\xff\r\n" * 9,
}


@pytest.mark.parametrize("answer", FALSE.values(), ids=FALSE)
async def test_a_redis_that_answers_falsely_is_told_everything_once_it_is_right_again(redis_server, answer):
    async with Between(redis_server) as between, Running(between) as running:
        old = entry_of(1)
        running.holdings.add(key(1), old)
        await running.until([key(1)], [10])
        between.answer = answer
        await eventually(lambda: running.publisher.num_errors >= 2)
        running.holdings.removed(old.key)
        running.holdings.add(key(2), entry_of(2, tokens=20))
        await eventually(lambda: running.publisher.num_errors >= 4)
        between.answer = None
        await running.until([key(1), key(2)], [0, 20])
        await eventually(lambda: running.publisher.is_up)
        assert len(await running.registry.replicas()) == 1
    assert running.left == []


@pytest.mark.parametrize("name", [b"replicas", b"d:" + key(1).digest], ids=["replicas", "claims"])
async def test_a_foreign_key_in_the_place_of_ours_keeps_nothing_from_being_published(redis_server, name):
    redis_server.client.set(b"tessera:" + name, "foreign")
    async with Running(redis_server) as running:
        for number in (1, 2):
            running.holdings.add(key(number), entry_of(number))
        await running.until([key(1), key(2)], [10, 10])
        assert (running.publisher.num_errors, running.registry.num_invalid > 0) == (0, True)


class Recording:
    """A registry that notes when it is told of which documents."""

    def __init__(self):
        self.told = []

    async def beat(self, replica):
        return True

    async def leave(self, replica_id):
        pass

    async def publish(self, holder, changes):
        self.told += [(asyncio.get_running_loop().time(), document) for document in changes]


async def published(seconds, *additions):
    """The documents told within some time, and when, if holdings are added one after the other."""
    registry, holdings = Recording(), Holdings()
    publisher = Publisher(registry, lambda id: replica(1, id=id), holdings)
    task = asyncio.create_task(publisher.run())
    for document, entry in additions:
        holdings.add(document, entry)
        await asyncio.sleep(seconds / len(additions))
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    return registry.told


def test_nothing_is_told_twice(monkeypatch):
    held = key(1), entry_of(1)
    with virtual_time(monkeypatch, "replicas.publisher") as run:
        assert [document for _, document in run(published(60, held, held))] == [key(1)]


def test_claims_are_repeated_before_they_expire(monkeypatch):
    monkeypatch.setattr(publisher_module, "CLAIM_TTL_S", 60)
    with virtual_time(monkeypatch, "replicas.publisher") as run:
        told = run(published(54, (key(1), entry_of(1))))
    (first, _), (second, _) = told
    assert second - first < 60


async def test_a_redis_that_was_never_reached_is_told_once(redis_server, caplog):
    redis_server.stop()
    async with Running(redis_server) as running:
        await eventually(lambda: running.publisher.num_errors >= 3)
    redis_server.start()
    assert [each.message.partition(":")[0] for each in caplog.records] == ["registry lost"]


async def test_stored_documents_are_claimed_for_the_storage_and_outlive_the_replica(redis_server):
    registry = RedisRegistry(redis_server.url, timeout_s=1)

    async def is_claimed():
        return await registry.claims([key(1)]) == [[Claim("cafe", Holding(Tier.DISK, 10))]]

    async with Running(redis_server) as running:
        running.storages = ("beef", "cafe")
        running.holdings.add(key(1), replace(entry_of(1), tiers=("file",), state=EntryState.STORED))
        await eventually(is_claimed)
    assert running.left == []
    assert await is_claimed()
    await registry.close()
