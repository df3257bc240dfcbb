# SPDX-License-Identifier: Apache-2.0
"""The registry, in this process and in a real Redis."""

import asyncio
import json
import shutil
import subprocess
import time
from contextlib import suppress

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis import Redis

from machine.server_process import free_port, is_free
from replicas.redis_registry import BATCH, MOST_REPLICAS, RedisRegistry
from replicas.registry import FILL_S, Claim, Found, RegistryError, origin_of
from replicas.routing import Candidate, Wanted, rank
from replicas.signing import PeerKey
from tests.cache.helpers import holding, key, replica
from tests.fuzzing import ends, json_values, objects
from tests.redis_server import RedisServer
from tests.support.peer_files import peer
from tests.support.registries import InProcessRegistry
from tests.support.waiting import until

PATIENT_S = 10
HANGS_S = 1
"""Timeout for tests in which Redis hangs; a responsive Redis is faster even on a busy machine."""


SECRET = "the replicas' secret"


@pytest.fixture
async def connect(redis_server):
    """Makes registries in Redis, which are closed at the end."""
    made = []

    def registry(key=None, url=redis_server.url, **options):
        made.append(RedisRegistry(url, key, **{"timeout_s": PATIENT_S, **options}))
        return made[-1]

    yield registry
    for each in made:
        await each.close()


@pytest.fixture
def redis_registry(connect):
    return connect(lease_s=2)


@pytest.fixture(params=["in process", "redis"])
def registry(request):
    return InProcessRegistry() if request.param == "in process" else request.getfixturevalue("redis_registry")


async def test_replicas_are_there_from_their_first_beat_until_they_leave(registry):
    assert await registry.replicas() == []
    assert not await registry.beat(replica(2))
    assert not await registry.beat(replica(1))
    assert await registry.beat(replica(2, load=5))
    assert await registry.replicas() == [replica(1), replica(2, load=5)]
    await registry.leave(replica(1).id)
    assert await registry.replicas() == [replica(2, load=5)]


async def test_a_call_that_is_cancelled_ends_cancelled_whenever_that_is(redis_registry):
    """A swallowed cancellation keeps a server from stopping: its publisher goes on."""
    await redis_registry.beat(replica(1))
    for steps in range(30):
        beat = asyncio.create_task(redis_registry.beat(replica(1)))
        for _ in range(steps):
            await asyncio.sleep(0)
        is_late = not beat.cancel()
        await asyncio.wait([beat])
        assert beat.cancelled() or is_late, steps


async def test_claims_come_and_go(registry):
    one, two = replica(1).id, replica(2).id
    await registry.publish(one, {key(1): holding(10), key(2): holding(20)})
    await registry.publish(two, {key(1): holding(30), key(3): None})
    found = await registry.claims([key(1), key(2), key(3)])
    both = [Claim(one, holding(10)), Claim(two, holding(30))]
    assert [sorted(claims) for claims in found] == [both, [Claim(one, holding(20))], []]
    await registry.publish(one, {key(1): None, key(2): holding(21)})
    assert await registry.claims([key(2), key(1)]) == [[Claim(one, holding(21))], [Claim(two, holding(30))]]
    assert await registry.claims([]) == []
    await registry.publish(replica(1).id, {key(i): holding(i) for i in range(10, 2 * BATCH + 17)})
    found = await registry.claims([key(i) for i in range(10, 2 * BATCH + 17)])  # in batches
    assert [claim.holding.tokens for (claim,) in found] == list(range(10, 2 * BATCH + 17))


async def test_a_replica_that_is_not_heard_of_is_gone_when_its_lease_ends(redis_registry, redis_server):
    await redis_registry.beat(replica(1))
    await asyncio.sleep(1.2)
    await redis_registry.beat(replica(2))
    await asyncio.sleep(1.2)
    assert await redis_registry.replicas() == [replica(2)]
    assert redis_server.client.smembers("tessera:replicas") == {replica(2).id.encode()}
    assert not await redis_registry.beat(replica(1))


async def test_everything_in_redis_expires(redis_registry, redis_server):
    await redis_registry.beat(replica(1))
    await redis_registry.publish(replica(1).id, {key(1): holding()})
    await redis_registry.begin_fills(replica(1).id, [key(2)])
    names = set(redis_server.client.keys("*")) - {b"tessera:replicas"}
    assert len(names) == 3
    assert all(redis_server.client.ttl(name) > 0 for name in names)
    (filler,) = redis_server.client.keys("tessera:f:*")
    assert redis_server.client.pttl(filler) <= FILL_S * 1000


def heartbeat(**changes):
    return json.dumps({**replica(1).to_dict(), **changes}).encode()


async def test_what_is_no_heartbeat_is_ignored_and_counted(redis_registry, redis_server):
    await redis_registry.beat(replica(2))
    redis_server.client.sadd("tessera:replicas", replica(1).id)
    texts = [b"", b"not json", b"[" * 100_000, b"{}", b"[]"]
    numbers = [heartbeat(load=load) for load in (-1, True, 10**400)]
    names = [heartbeat(name=name) for name in ("a\r\nx-other: b", "\ud800")]
    others = [heartbeat(models=models) for models in ("m", ["m" * 10] * 20_000)]
    others += [heartbeat(url="file:///etc/passwd"), heartbeat(more=1), heartbeat(id=replica(2).id)]
    for number, value in enumerate([*texts, *numbers, *names, *others], 1):
        redis_server.client.set(f"tessera:r:{replica(1).id}", value)
        assert await redis_registry.replicas() == [replica(2)], value[:200]
        assert redis_registry.num_invalid == number, value[:200]
    redis_server.client.sadd("tessera:replicas", b"\xff\xfe", "")  # ids that are no text are forgotten
    assert await redis_registry.replicas() == [replica(2)]
    assert not redis_server.client.smembers("tessera:replicas") & {b"\xff\xfe", b""}


async def test_what_is_not_sealed_with_the_secret_is_ignored_and_counted(connect, redis_server):
    sealed, client = connect(PeerKey(SECRET)), redis_server.client
    await sealed.beat(replica(1))
    await sealed.beat(replica(2))
    name, forged = f"tessera:r:{replica(1).id}", heartbeat(url="http://elsewhere")
    genuine = client.get(name)
    assert await sealed.replicas() == [replica(1), replica(2)]
    wrong = {
        "unsealed": forged,
        "changed": genuine.replace(b"http://", b"http://x"),
        "another under the seal": genuine[:76] + forged,
        "by another secret": PeerKey("another secret").seal("heartbeat", forged),
        "old": PeerKey(SECRET, lambda: time.time() - 60).seal("heartbeat", genuine[76:]),
        "of another replica": client.get(f"tessera:r:{replica(2).id}"),
    }
    for number, (kind, value) in enumerate(wrong.items(), 1):
        client.set(name, value)
        assert await sealed.replicas() == [replica(2)], kind
        assert sealed.num_invalid == number, kind
    client.set(name, genuine)
    plain = connect()  # a router that only routes has no secret, and reads them unchecked
    await plain.beat(replica(3))
    assert await plain.replicas() == [replica(1), replica(2), replica(3)]
    assert await sealed.replicas() == [replica(1), replica(2)]


def test_a_replicas_url_is_an_origin():
    of_names = ["http://a", "http://localhost:1", "http://10.0.0.1:8000"]
    of_ipv6 = ["https://[2001:db8::1]:8000", "http://[::1]:1", "http://[64:ff9b::a00:1]", "http://[fd00:ec2::1]"]
    assert [origin_of(url) for url in (*of_names, *of_ipv6)] == of_names + of_ipv6
    assert origin_of("http://a:8000/") == "http://a:8000"


NO_ORIGINS = {
    "of another scheme": ["ftp://a", "file:///etc/passwd", "//a", "a:8000", ""],
    "without a host": ["http:a", "http://", "http://[::1", "http://999.1.1.1"],
    "with no port": ["http://a:x", "http://a:-1", "http://a:99999"],
    "with more": ["http://a/path", "http://a/?query", "http://a?", "http://a#fragment", "http://user:password@a"],
    "with tricks": ["http://a@b", "http://a\\@b", "http://a b", "http://a\nb"],
    "link-local": ["http://169.254.169.254", "http://169.254.169.254:80", "http://[fe80::1]", "http://224.0.0.1"],
    "link-local in disguise": ["http://2852039166", "http://0xa9fea9fe", "http://[::ffff:169.254.169.254]"],
    "clouds' metadata": [
        *("http://100.100.100.200", "http://168.63.129.16", "http://[::ffff:192.0.0.192]"),
        *("http://[fd00:ec2::254]", "http://[fd20:ce::254]"),
    ],
    "link-local by way of IPv6": [
        *("http://[64:ff9b::a9fe:a9fe]", "http://[64:ff9b:1:a9fe:a9:fe00::]", "http://[::169.254.169.254]"),
        *("http://[2002:a9fe:a9fe::]", "http://[::ffff:0:169.254.169.254]"),
    ],
    "of nobody or everybody": ["http://0.0.0.0:1", "http://0", "http://[::]", "http://255.255.255.255"],
}


@pytest.mark.parametrize("kind", NO_ORIGINS)
def test_urls_that_are_none_are_refused(kind):
    for url in NO_ORIGINS[kind]:
        with pytest.raises(ValueError, match=r"URL|scheme|address"):
            origin_of(url)


async def test_what_is_no_claim_is_ignored_and_counted(redis_registry, redis_server):
    await redis_registry.publish(replica(1).id, {key(1): holding(), key(3): holding()})
    client = redis_server.client
    client.hset(b"tessera:d:" + key(1).digest, b"\0\1", b"short")
    client.hset(b"tessera:d:" + key(1).digest, b"\0\2", bytes([200]) + bytes(12))
    client.set(b"tessera:d:" + key(2).digest, "no hash")
    found = await redis_registry.claims([key(1), key(2), key(3)])
    assert found == [[Claim(replica(1).id, holding())], [], [Claim(replica(1).id, holding())]]
    assert redis_registry.num_invalid == 3


FOREIGN = {
    "text": lambda client, name: client.set(name, "foreign"),
    "list": lambda client, name: client.rpush(name, "foreign"),
    "hash": lambda client, name: client.hset(name, "foreign", "foreign"),
    "set": lambda client, name: client.sadd(name, "foreign"),
}
OURS = {
    "replicas": b"tessera:replicas",
    "heartbeat": b"tessera:r:" + replica(1).id.encode(),
    "claims": b"tessera:d:" + key(1).digest,
    "filler": b"tessera:f:" + key(1).digest,
}


@pytest.mark.parametrize("kind", FOREIGN)
@pytest.mark.parametrize("name", OURS)
async def test_a_key_of_another_type_costs_only_what_it_said(redis_registry, redis_server, name, kind):
    """Everything is published and found as if the key weren't there."""

    async def spoiled(call):
        redis_server.client.delete(OURS[name])
        FOREIGN[kind](redis_server.client, OURS[name])
        return await call

    one, claims = replica(1), [Claim(replica(1).id, holding())]
    await spoiled(redis_registry.beat(one))
    assert await redis_registry.replicas() == [one]
    await spoiled(redis_registry.publish(one.id, {key(1): holding()}))
    assert await redis_registry.claims([key(1)]) == [claims]
    found = await spoiled(redis_registry.begin_fills(one.id, [key(1)]))
    assert found == [Found([] if name == "claims" else claims, found[0].filler)]
    assert len(await spoiled(redis_registry.claims([key(1), key(2)]))) == 2
    await spoiled(redis_registry.replicas())
    await redis_registry.beat(one)
    assert await redis_registry.replicas() == [one]
    await spoiled(redis_registry.leave(one.id))
    assert await redis_registry.replicas() == []


async def test_a_key_of_another_type_is_removed_and_the_log_says_so(redis_registry, redis_server, caplog):
    for name in ("claims", "filler"):
        redis_server.client.sadd(OURS[name], "foreign")
    redis_server.client.set(OURS["replicas"], "foreign")
    found = await redis_registry.begin_fills(replica(1).id, [key(1), key(2)])
    assert found == [Found([], replica(1).id)] * 2
    await redis_registry.beat(replica(1))
    assert redis_registry.num_invalid == 3
    assert caplog.messages == [
        "keys of another type than ours were in Redis, and are removed: 2 of d, f",
        "keys of another type than ours were in Redis, and are removed: 1 of replicas",
    ]


CALLS = {
    "beat": lambda registry: registry.beat(replica(1)),
    "replicas": lambda registry: registry.replicas(),
    "publish": lambda registry: registry.publish(replica(1).id, {key(1): holding()}),
    "claims": lambda registry: registry.claims([key(1)]),
    "begin_fills": lambda registry: registry.begin_fills(replica(1).id, [key(1)]),
    "leave": lambda registry: registry.leave(replica(1).id),
}


@pytest.mark.parametrize("name", CALLS)
async def test_a_redis_that_does_not_answer_costs_the_timeout_only(connect, redis_server, name):
    registry, call = connect(timeout_s=HANGS_S), CALLS[name]
    await call(registry)
    with redis_server.frozen(), pytest.raises(RegistryError, match=f"did not answer within {HANGS_S} s"):
        await call(registry)
    await asyncio.sleep(0.1)
    await call(registry)
    redis_server.stop()
    with pytest.raises(RegistryError, match="Redis"):
        await call(registry)
    redis_server.start()
    await call(registry)


NO_REDIS = {
    "nested lists": b"*1\r\n" * 20_000,
    "numbers": b":1\r\n" * 50,
    "lists of a number": b"*1\r\n:1\r\n" * 50,
    "lists of nothing": b"*1\r\n*-1\r\n" * 50,
    "pairs": b"*2\r\n:1\r\n$1\r\na\r\n" * 50,
    "maps": b"%1\r\n:1\r\n$1\r\na\r\n" * 50,
    "a web server": b"HTTP/1.1 400 Bad Request\r\n\r\n",
}


@pytest.mark.parametrize("kind", NO_REDIS)
@pytest.mark.parametrize("name", CALLS)
async def test_what_is_no_redis_is_a_lost_registry(connect, name, kind):
    def talk(connection, _):
        connection.sendall(NO_REDIS[kind])
        while connection.recv(65536):
            pass

    with peer(talk) as url, suppress(RegistryError):  # some answers are right ones of some calls
        registry = connect(url=url.replace("http", "redis"), timeout_s=0.5)
        registry._ids = (replica(1).id.encode(),)
        await CALLS[name](registry)


async def test_an_answer_that_comes_too_late_is_not_taken_for_the_next(connect, redis_server):
    registry = connect(timeout_s=HANGS_S)
    await registry.publish(replica(1).id, {key(1): holding(1), key(2): holding(2)})
    with redis_server.frozen(), pytest.raises(RegistryError):
        await registry.claims([key(1)])
    assert await registry.claims([key(2)]) == [[Claim(replica(1).id, holding(2))]]


async def test_a_full_redis_still_answers_questions_and_keeps_nobody_from_computing(redis_registry, redis_server):
    await redis_registry.publish(replica(2).id, {key(1): holding(10)})
    claims = [Claim(replica(2).id, holding(10))]
    with redis_server.configured(maxmemory="1", **{"maxmemory-policy": "noeviction"}):
        for name in ("publish", "beat"):
            with pytest.raises(RegistryError, match="memory"):
                await CALLS[name](redis_registry)
        assert await redis_registry.claims([key(1)]) == [claims]
        found = await redis_registry.begin_fills(replica(1).id, [key(1), key(2)])
    assert found == [Found(claims, replica(1).id), Found([], replica(1).id)]


async def test_clusters_in_other_databases_see_nothing(connect, redis_server):
    url = redis_server.url.rpartition("/")[0] if redis_server.url.count("/") > 2 else redis_server.url
    ours, theirs = (connect(url=f"{url}/{database}") for database in (0, 1))
    await ours.beat(replica(1))
    await ours.publish(replica(1).id, {key(1): holding()})
    assert await theirs.replicas() == []
    assert await theirs.claims([key(1)]) == [[]]


async def test_a_password_is_not_repeated_in_errors(connect, redis_server):
    with pytest.raises(RegistryError) as caught:
        await connect(url=redis_server.url.replace("redis://", "redis://user:secret@")).replicas()
    assert "secret" not in str(caught.value)


async def test_a_look_up_of_many_documents_is_one_round_trip(redis_registry, redis_server):
    await redis_registry.publish(replica(1).id, {key(i): holding() for i in range(20)})
    started = redis_server.client.info("stats")["total_reads_processed"]
    await redis_registry.claims([key(i) for i in range(20)])
    ended = redis_server.client.info("stats")["total_reads_processed"]
    # One read for the lookup, one for this test's second lookup.
    assert ended - started == 2


async def test_who_says_first_that_it_computes_a_document_is_told_to_the_others(registry):
    one, two = replica(1).id, replica(2).id
    await registry.publish(two, {key(2): holding(20)})
    assert await registry.begin_fills(one, [key(1), key(2)]) == [Found([], one), Found([Claim(two, holding(20))], one)]
    assert await registry.begin_fills(two, [key(1), key(3)]) == [Found([], one), Found([], two)]
    assert await registry.begin_fills(one, [key(1)]) == [Found([], one)]
    await registry.publish(one, {key(1): holding(10)})
    assert await registry.begin_fills(two, [key(1)]) == [Found([Claim(one, holding(10))], two)]
    assert await registry.begin_fills(two, []) == []


async def test_who_is_there_is_one_round_trip_unless_it_has_changed(redis_registry, redis_server):
    async def commands():
        redis_server.client.config_resetstat()
        found = await redis_registry.replicas()
        stats = redis_server.client.info("commandstats")
        return len(found), stats["cmdstat_srandmember"]["calls"]

    assert await commands() == (0, 1)
    await redis_registry.beat(replica(1))
    assert await commands() == (1, 2)
    assert await commands() == (1, 1)
    await redis_registry.beat(replica(2))
    assert await commands() == (2, 2)
    await redis_registry.leave(replica(1).id)
    assert await commands() == (1, 2)
    assert await commands() == (1, 1)


async def test_of_more_replicas_than_are_listed_those_that_are_listed_stay(redis_registry, redis_server):
    """Even if whoever writes to Redis names any number, with heartbeats."""

    def name(numbers):
        pipe = redis_server.client.pipeline()
        for number in numbers:
            each = replica(number)
            pipe.sadd("tessera:replicas", each.id).set(f"tessera:r:{each.id}", json.dumps(each.to_dict()))
        pipe.execute()

    name([1, 3000])
    assert await redis_registry.replicas() == [replica(1), replica(3000)]
    name(range(2, 2000))
    for _ in range(3):
        listed = await redis_registry.replicas()
        assert len(listed) == len(set(map(str, listed))) == MOST_REPLICAS
        assert {replica(1).id, replica(3000).id} <= {each.id for each in listed}
    redis_server.client.delete(*(f"tessera:r:{replica(number).id}" for number in range(2, 2000)))
    for _ in range(50):
        listed = await redis_registry.replicas()
    assert listed == [replica(1), replica(3000)]
    await redis_registry.beat(replica(2))
    assert await redis_registry.replicas() == [replica(1), replica(2), replica(3000)]


async def test_who_joins_while_others_are_asked_for_stays(redis_registry, connect):
    newcomer = connect()
    await asyncio.gather(
        *(redis_registry.replicas() for _ in range(20)), *(newcomer.beat(replica(n)) for n in range(9))
    )
    assert len(await redis_registry.replicas()) == 9


IDS = [replica(1).id.encode(), replica(2).id.encode(), b"\xff", b"", b"ab cd", b"AB", b"x"]
urls = ["http://a:1", "https://[::1]:2/x", "http://", "http://[", "http://a:99999", "http://999.1.1.1", "http://a b"]
names = ["a", "é", "", " a", "a\r\nb: c", "\ud800"]
loads, other_ids = [0, 10**18, 10**400, -1, 0.5], [replica(2).id, "ab cd", "AB", "\ud800"]
changes = st.one_of(
    *(objects(url=st.sampled_from(urls)), objects(name=st.sampled_from(names))),
    *(objects(load=st.sampled_from(loads)), objects(id=st.sampled_from(other_ids))),
    objects(fingerprint=json_values, models=json_values, capacity_tokens=json_values, more=json_values),
)
heartbeats = st.binary(max_size=40) | changes.map(lambda changed: heartbeat(**changed))
members, few = st.sampled_from(IDS) | st.binary(max_size=8), {"min_size": 1, "max_size": 3}
collected = (st.dictionaries(members, st.binary(max_size=14), **few), st.sets(members, **few))
values = st.one_of(heartbeats, *collected, st.lists(st.binary(max_size=8), **few))
ours = st.sampled_from([b"replicas", *(b"r:" + id for id in IDS), *(kind + key(1).digest for kind in (b"d:", b"f:"))])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(ours, values, max_size=5), st.sets(st.sampled_from(IDS), max_size=4), heartbeats)
def test_whatever_redis_holds_under_our_names_it_is_ignored_or_can_be_used(redis_server, held, members, own):
    client = redis_server.client
    held = {b"r:" + IDS[0]: own, **held}
    client.flushall()
    for name, value in held.items():
        put = {dict: lambda n, v: client.hset(n, mapping=v), set: lambda n, v: client.sadd(n, *v)}
        put |= {list: lambda n, v: client.rpush(n, *v), bytes: client.set}
        put[type(value)](b"tessera:" + name, value)
    if not isinstance(held.get(b"replicas"), bytes | list | dict):
        client.sadd("tessera:replicas", *members, IDS[0])
    with ends():
        asyncio.run(use(redis_server.url))


async def use(url: str) -> None:
    """All uses of registry data by replicas and routers."""
    registry = RedisRegistry(url, timeout_s=PATIENT_S)
    asked = [key(1), key(2)]
    await registry.replicas()
    replicas = await registry.replicas()
    claims = await registry.claims(asked)
    assert len(claims) == len(await registry.begin_fills(replica(3).id, asked)) == 2
    wanted = [Wanted(each, 5, found) for each, found in zip(asked, claims, strict=True)]
    ranked = rank(wanted, [Candidate(each.id, each.name, each.load) for each in replicas])
    assert len(ranked) == len({each.id for each in replicas})
    for each in replicas:
        httpx.Request("GET", httpx.URL(each.url).copy_with(raw_path=b"/x"), headers={b"name": each.name.encode()})
        await registry.publish(each.id, {key(2): holding()})
    await registry.close()


@pytest.mark.parametrize("name", ["beat", "publish", "begin_fills"])
async def test_a_primary_that_became_a_replica_loses_its_connections(redis_registry, redis_server, name):
    """Otherwise writes are refused for as long as the connection lasts, although the name leads to a new primary."""
    await CALLS[name](redis_registry)
    own = [each["id"] for each in redis_server.client.client_list() if each["cmd"] != "client|list"]
    assert len(own) == 1
    redis_server.client.replicaof("127.0.0.1", "9")
    with pytest.raises(RegistryError, match="read only replica"):
        await CALLS[name](redis_registry)
    redis_server.client.replicaof("NO", "ONE")
    await CALLS[name](redis_registry)
    assert own[0] not in [each["id"] for each in redis_server.client.client_list()]


@pytest.fixture
def sentinel(redis_server, tmp_path):
    """A replica of Redis and a sentinel, by whose word it becomes the primary: the sentinel's port."""
    other, port = RedisServer(tmp_path), free_port()
    other.client.replicaof("127.0.0.1", redis_server.port)
    config = tmp_path / "sentinel.conf"
    watched = f"sentinel monitor main 127.0.0.1 {redis_server.port} 1\nsentinel down-after-milliseconds main 300\n"
    config.write_text(f"port {port}\nbind 127.0.0.1\n{watched}sentinel failover-timeout main 2000\n")
    process = subprocess.Popen([shutil.which("redis-server"), config, "--sentinel"], stdout=subprocess.DEVNULL)
    try:
        until(lambda: not is_free(port))
        asked = Redis(port=port)
        until(lambda: asked.sentinel_slaves("main"))  # which it learns of from the primary, in ten seconds at most
        yield port
    finally:
        process.kill()
        process.wait()
        other.stop()


async def test_after_a_failover_the_new_primary_that_sentinels_name_is_asked(redis_server, sentinel, connect):
    registry = connect(url=f"redis+sentinel://127.0.0.1:{sentinel},127.0.0.1:9/main/0", timeout_s=2)
    await registry.beat(replica(1))
    assert await registry.beat(replica(1))
    redis_server.stop()
    try:
        deadline = time.monotonic() + 60
        while True:
            with suppress(RegistryError):
                await registry.beat(replica(1))
                assert await registry.replicas() == [replica(1)]
                break
            assert time.monotonic() < deadline
            await asyncio.sleep(0.1)
    finally:
        redis_server.start()


async def test_a_sentinel_that_hangs_is_passed_over(sentinel, connect, unused_tcp_port):
    async def hang(*_):
        await asyncio.sleep(60)

    async with await asyncio.start_server(hang, "127.0.0.1", unused_tcp_port):
        url = f"redis+sentinel://127.0.0.1:{unused_tcp_port},127.0.0.1:{sentinel}/main"
        registry = connect(url=url, timeout_s=HANGS_S)
        with pytest.raises(RegistryError, match="did not answer"):
            await registry.beat(replica(1))
        assert not await registry.beat(replica(1))


@pytest.mark.parametrize("url", ["redis+sentinel://host", "redis+sentinel:///main", "http+sentinel://host/main"])
def test_sentinels_and_their_primary_must_be_named(url):
    with pytest.raises(ValueError, match="sentinels are given as"):
        RedisRegistry(url)
