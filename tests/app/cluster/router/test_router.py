# SPDX-License-Identifier: Apache-2.0
"""The router from the perspective of clients, replicas and operators."""

import asyncio
import gzip
import json
import random
import signal
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import httpx
import pytest
from starlette.responses import JSONResponse, Response, StreamingResponse
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from app.cluster.router.app import build_app
from app.cluster.router.proxy import http_client
from app.cluster.router.settings import RouterSettings
from app.documents.request_documents import wanted_documents
from cache.segments.holdings import Holding, Tier
from machine.server_process import ServerProcess
from replicas.redis_registry import RedisRegistry
from replicas.registry import Replica
from replicas.signing import PeerKey
from tests.app.cluster.router.stand_in import (
    Cluster,
    StandIn,
    begin_and_break,
    begin_and_wait,
    busy,
    send_head_and_break,
    send_head_and_wait,
    wait_for_disconnect,
)
from tests.serving import client_of, served
from tests.support.loops import longest_pause
from tests.support.waiting import eventually

PATH = "/v1/rag/chat"
ASKED = {"system": "S", "chunks": ["one", "two"], "question": "?"}


@pytest.fixture
def stand_ins():
    return [StandIn("a"), StandIn("b")]


@pytest.fixture
async def cluster(redis_server, stand_ins):
    async with Cluster(redis_server, *stand_ins).running() as cluster:
        yield cluster


async def ask(cluster, **fields):
    return await cluster.client.post(PATH, json={**ASKED, **fields})


async def ask_for_new(cluster):
    """Ask for a document that no replica has."""
    return await ask(cluster, chunks=[str(random.random())])


def all_answer(stand_ins, answer):
    for stand_in in stand_ins:
        stand_in.answer = answer


@asynccontextmanager
async def speaking(cluster, name, answer):
    """A replica with a model of the same name, whose answers are written by hand."""

    async def is_known():
        return name in await cluster.names()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        await cluster.registry.beat(Replica("e" * 12, name, url, (name,), "f"))
        await eventually(is_known)
        yield


async def claim(cluster, number, body=ASKED):
    holding = Holding(Tier.DEVICE, 5000)
    changes = {document.key: holding for document in wanted_documents(PATH, {**body})}
    await cluster.registry.publish(cluster.replicas[number].id, changes)


@pytest.mark.parametrize("number", [0, 1])
async def test_a_request_goes_to_who_holds_its_documents(cluster, number):
    name = "ab"[number]
    await claim(cluster, number)
    for chunks in (["one", "two"], ["two", "one"], ["one"]):
        answer = await ask(cluster, chunks=chunks)
        assert (answer.json(), answer.headers["x-tessera-replica"]) == ({"from": name}, name)
    decisions = (await cluster.about())["decisions"]
    assert [decision["held_tokens"] for decision in decisions] == [10_000, 10_000, 5000]
    assert await cluster.metric("tessera_router_held_tokens_total") == 25_000
    assert await cluster.metric("tessera_router_requests_total", replica=name, status="200") == 3


async def test_what_is_asked_for_in_another_way_finds_the_same_replica(cluster):
    by_id = {"chunks": [{"id": "d1"}], "question": "?"}
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "?"}]
    await claim(cluster, 1)
    await claim(cluster, 1, by_id)
    chat = {"messages": messages, "documents": ["one", "two"]}
    for path, body in (("/v1/chat/completions", chat), (PATH, by_id)):
        assert (await cluster.client.post(path, json=body)).json() == {"from": "b"}


async def test_others_go_on_while_a_long_body_is_read():
    body = json.dumps({"chunks": [str(number) for number in range(100_000)], "question": "?"})
    async with client_of(build_app(RouterSettings())) as client:
        paused, answer = await longest_pause(client.post(PATH, content=body))
    assert answer.status_code == 503  # the router knows no replica yet
    assert paused < 0.5


async def test_the_turns_of_a_conversation_meet(cluster):
    at = set()
    for number in range(20):
        turns = [{"role": "user", "content": f"{number} {'word ' * 400}"}]
        for _ in range(3):
            answer = await cluster.client.post("/v1/chat/completions", json={"messages": turns})
            at.add((number, answer.json()["from"]))
            turns += [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": "And then?"}]
    assert len(at) == 20
    assert {name for _, name in at} == {"a", "b"}
    assert (await cluster.about())["decisions"] == []


@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_strict_clients_get_plain_answers(cluster, method):
    """One `Date` and one `Server`, no redirection to a replica's own address, `HEAD` as `GET`."""
    answer = await cluster.client.request(method, "/v1/models/")
    assert (answer.status_code, bool(answer.content)) == (200, method == "GET")
    assert [len(answer.headers.get_list(name)) for name in ("date", "server")] == [1, 1]
    ((asked, _),) = cluster.asked
    assert (asked["method"], asked["path"]) == ("GET", "/v1/models")


async def test_a_request_arrives_as_it_was_sent(cluster):
    body = random.Random(0).randbytes(100_000)
    own, via = {"x-mine": "1", "authorization": "Bearer k"}, "10.9.8.7, 127.0.0.1"
    hop = {"connection": "x-hop", "x-hop": "1", "x-tessera-replica": "a"}
    await cluster.client.put("/some/p%20ath?q=%20a&b", content=body, headers={**own, **hop, "x-forwarded-for": via})
    ((scope, arrived),) = cluster.asked
    assert arrived == body
    assert (scope["method"], scope["raw_path"], scope["query_string"]) == ("PUT", b"/some/p%20ath", b"q=%20a&b")
    told = [value.decode() for name, value in scope["headers"] if name == b"x-forwarded-for"]
    assert (told[0], len(told)) == (via, 2)  # the last one is the router's own client
    given = {name.decode(): value.decode() for name, value in scope["headers"]}
    assert given.items() >= own.items()
    assert not given.keys() & {"x-hop", "x-tessera-replica"}


@pytest.mark.parametrize("end", [b" ", b"\t", b" \t "])
async def test_white_space_behind_a_header_is_no_fault_of_the_replicas(cluster, end):
    """HTTP allows it, httptools keeps it, and h11 wouldn't send it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(cluster.url).port)
    writer.write(b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nx-mine: 1" + end + b"\r\n\r\n")
    assert (await reader.readline()).split()[1] == b"200"
    writer.close()
    ((scope, _),) = cluster.asked
    assert (b"x-mine", b"1") in scope["headers"]
    assert await cluster.names() == ["a", "b"]


async def test_an_answer_passes_byte_for_byte(cluster, stand_ins):
    randomly = random.Random(0)
    pieces = [randomly.randbytes(randomly.choice([1, 10, 1000, 70_000])) for _ in range(50)]
    headers = {"content-type": "text/event-stream", "content-encoding": "gzip", "x-own": "1"}
    all_answer(stand_ins, StreamingResponse(iter(pieces), headers=headers))
    async with cluster.client.stream("POST", PATH, json=ASKED) as answer:
        arrived = b"".join([piece async for piece in answer.aiter_raw()])
    assert arrived == b"".join(pieces)
    assert answer.headers.items() >= headers.items()


@pytest.mark.parametrize("answer", [wait_for_disconnect, begin_and_wait])
async def test_a_client_that_leaves_is_gone_for_the_replica_too(cluster, stand_ins, answer):
    async def load():
        return sum([await cluster.metric("tessera_router_load", replica=name) for name in "ab"])

    async def nothing_is_left():
        return await load() == 0

    all_answer(stand_ins, answer)
    asking = asyncio.create_task(ask(cluster))
    await eventually(lambda: cluster.asked)
    assert await load() == 1
    asking.cancel()
    await eventually(lambda: any(stand_in.disconnects for stand_in in stand_ins))
    await eventually(nothing_is_left)


PART = bytes(1 << 16)
PARTS = 4096


class Flood:
    """Answers with 256 MiB, and counts the parts that were taken from it."""

    def __init__(self):
        self.num_taken = 0

    async def __call__(self, scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        leaving = asyncio.create_task(wait_for_disconnect(scope, receive, send))
        while self.num_taken < PARTS and not leaving.done():
            await send({"type": "http.response.body", "body": PART, "more_body": True})
            self.num_taken += 1
        leaving.cancel()
        await send({"type": "http.response.body"})

    async def stands_still(self):
        before = self.num_taken
        await asyncio.sleep(0.5)
        return self.num_taken == before > 0


@pytest.mark.parametrize("leaves", [True, False])
async def test_of_an_answer_that_a_client_does_not_read_the_router_takes_no_more_than_sockets_hold(
    cluster, stand_ins, leaves
):
    flood = Flood()
    all_answer(stand_ins, flood)
    async with cluster.client.stream("POST", PATH, json=ASKED) as answer:
        await eventually(flood.stands_still, 60)
        assert flood.num_taken < PARTS / 4
        if not leaves:
            assert sum([len(part) async for part in answer.aiter_raw()]) == PARTS * len(PART)
    if leaves:
        await eventually(lambda: any(stand_in.disconnects for stand_in in stand_ins))
        assert flood.num_taken < PARTS / 4


async def test_cookies_of_a_replica_are_the_clients(cluster, stand_ins):
    all_answer(stand_ins, Response(headers={"set-cookie": "session=a client's"}))
    assert (await ask(cluster)).headers["set-cookie"] == "session=a client's"
    async with http_client() as client:
        await client.get(f"{cluster.replicas[0].url}/v1/models")
        assert not client.cookies


async def test_a_busy_replica_sends_its_requests_on(cluster, stand_ins):
    await claim(cluster, 0)
    stand_ins[0].answer = busy("a")
    assert (await ask(cluster)).json() == {"from": "b"}
    stand_ins[1].answer = busy("b")
    answer = await ask(cluster)
    assert (answer.status_code, answer.json()["error"]["message"]) == (503, "b is busy")
    assert await cluster.metric("tessera_router_retries_total", reason="busy") == 2


async def test_other_errors_are_the_clients_and_a_stream_that_breaks_does_not_look_whole(cluster, stand_ins):
    all_answer(stand_ins, Response(b"broken", 500))
    answer = await ask(cluster)
    assert (answer.status_code, answer.content) == (500, b"broken")
    assert len(cluster.asked) == 1
    all_answer(stand_ins, begin_and_break)
    with pytest.raises(httpx.RemoteProtocolError):
        await ask(cluster)


async def test_an_answer_that_breaks_off_before_its_content_is_as_none(cluster, stand_ins):
    await claim(cluster, 0)
    stand_ins[0].answer = send_head_and_break
    assert (await ask(cluster)).json() == {"from": "b"}
    assert stand_ins[0].requests


@pytest.mark.parametrize("answer", [wait_for_disconnect, send_head_and_wait, begin_and_wait])
async def test_nobody_waits_for_a_replica_that_is_stopped(cluster, stand_ins, answer):
    """Its connections stay open, but its heartbeats end, and probes go unanswered."""
    await claim(cluster, 0)
    stand_ins[0].answer, stand_ins[0].health = answer, wait_for_disconnect
    asking = asyncio.create_task(ask(cluster))
    await eventually(lambda: stand_ins[0].requests)
    await cluster.registry.leave(cluster.replicas[0].id)
    if answer is begin_and_wait:
        with pytest.raises(httpx.RemoteProtocolError):
            await asking
    else:
        assert (await asking).json() == {"from": "b"}
    await eventually(lambda: stand_ins[0].disconnects)


async def test_nobody_waits_for_another_that_was_stopped_meanwhile(cluster, stand_ins):
    for stand_in in stand_ins:
        stand_in.answer = stand_in.health = wait_for_disconnect
    asking = asyncio.create_task(ask(cluster))
    await eventually(lambda: cluster.asked)
    for replica in cluster.replicas:
        await cluster.registry.leave(replica.id)
    answer = await asking
    assert (answer.status_code, answer.json()["error"]["message"]) == (503, "no replica can be reached")


async def test_a_replica_that_is_stopping_ends_what_it_has_begun(cluster, stand_ins):
    async def is_forgotten():
        return await cluster.names() == ["b"]

    async def begin_and_end(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not ends:
            await asyncio.sleep(0.01)
        await send({"type": "http.response.body", "body": b"whole"})

    ends = []
    await claim(cluster, 0)
    stand_ins[0].answer, stand_ins[0].health = begin_and_end, busy("a")
    asking = asyncio.create_task(ask(cluster))
    await eventually(lambda: stand_ins[0].requests)
    await cluster.registry.leave(cluster.replicas[0].id)
    await eventually(is_forgotten)
    ends.append(True)
    assert (await asking).content == b"whole"


async def test_without_redis_requests_still_meet(cluster, redis_server):
    redis_server.stop()
    assert len({(await ask(cluster)).json()["from"] for _ in range(5)}) == 1
    assert (await cluster.about())["registry"]["up"] is False
    assert await cluster.metric("tessera_router_registry_up") == 0
    redis_server.start()
    await cluster.beat()
    await claim(cluster, 1)

    async def found():
        return (await ask(cluster)).json() == {"from": "b"}

    await eventually(found)


async def test_while_redis_hangs_only_one_request_waits_for_it(cluster, redis_server):
    with redis_server.frozen():
        await ask(cluster)
        before = await cluster.metric("tessera_router_registry_errors_total")
        await asyncio.gather(*(ask(cluster) for _ in range(50)))
        # The directory polls once a second.
        assert await cluster.metric("tessera_router_registry_errors_total") - before <= 2


async def test_replicas_that_only_the_registry_has_lost_stay(cluster, redis_server):
    def polls():
        return redis_server.client.info("commandstats")["cmdstat_srandmember"]["calls"]

    redis_server.client.flushall()
    before = polls()
    await eventually(lambda: polls() >= before + 2)
    assert await cluster.names() == ["a", "b"]


async def test_a_replica_that_is_gone_is_forgotten_and_a_new_one_gets_requests(cluster):
    async def gets_requests():
        await ask_for_new(cluster)
        return bool(new.requests)

    async def is_forgotten():
        await cluster.beat()
        return await cluster.names() == ["a", "b"]

    with served(new := StandIn("c")) as url:
        await cluster.registry.beat(Replica("c" * 12, "c", url, ("m",), "f"))
        await eventually(gets_requests)
        assert await cluster.names() == ["a", "b", "c"]
    for _ in range(20):
        assert (await ask_for_new(cluster)).json()["from"] in "ab"
    await eventually(is_forgotten)


async def test_a_model_goes_to_who_serves_it(cluster):
    async def is_known():
        return [replica["models"] for replica in (await cluster.about())["replicas"]] == [["m"], ["other"]]

    await cluster.registry.beat(replace(cluster.replicas[1], models=("other",)))
    await eventually(is_known)
    for model, name in (("other", "b"), ("m", "a"), ("other", "b")):
        assert (await ask(cluster, model=model)).json() == {"from": name}


@pytest.mark.parametrize("head", [b"999 Odd\r\n", b"200 OK\r\nx-odd: a\x01b\r\n"], ids=["status", "header"])
async def test_an_answer_that_cannot_be_sent_on_is_as_none(cluster, head):
    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 " + head + b"content-length: 0\r\n\r\n")
        writer.close()

    async with speaking(cluster, "odd", answer):
        refused = await ask(cluster, model="odd")
        assert (refused.status_code, refused.json()["error"]["reason"]) == (503, "no_replica")


ENDLESS = {
    "informational": (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 1000),
    "headers": (b"HTTP/1.1 200 OK\r\n", b"a: b\r\n" * 1000),
    "header": (b"HTTP/1.1 200 OK\r\na: ", b"b" * 10_000),
    "informational headers": (b"HTTP/1.1 103 Early Hints\r\n", b"a: b\r\n" * 1000),
}


@pytest.mark.parametrize("kind", ENDLESS)
async def test_a_head_that_does_not_end_is_as_none_and_others_are_answered_meanwhile(cluster, kind):
    begin, part = ENDLESS[kind]
    closed = 0

    async def answer(reader, writer):
        nonlocal closed
        await reader.readuntil(b"\r\n\r\n")
        writer.write(begin)
        with suppress(OSError):
            while True:
                writer.write(part)
                await writer.drain()
        closed += 1

    async with speaking(cluster, "endless", answer):
        refused, *others = await asyncio.gather(ask(cluster, model="endless"), *(ask(cluster) for _ in range(10)))
        assert (refused.status_code, refused.json()["error"]["reason"]) == (503, "no_replica")
        assert [other.status_code for other in others] == [200] * 10
        await eventually(lambda: closed)


@pytest.mark.parametrize("head", [b"100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n", b"101 Switching Protocols\r\n"])
async def test_an_interim_answer_comes_before_another_and_no_connection_is_upgraded(cluster, head):
    async def answer(reader, writer):
        await reader.readuntil(b"}")
        writer.write(b"HTTP/1.1 " + head + b"content-length: 300000\r\n\r\n" + bytes(300_000))
        writer.close()

    async with speaking(cluster, "interim", answer):
        answered = await ask(cluster, model="interim")
        is_interim = head.startswith(b"100")
        assert (answered.status_code, len(answered.content) == 300_000) == ((200, True) if is_interim else (503, False))


async def test_a_client_may_name_the_replica(cluster):
    for name in "abba":
        answer = await cluster.client.get("/v1/cache/stats", headers={"x-tessera-replica": name})
        assert answer.json() == {"from": name}
    answer = await cluster.client.get("/v1/cache/stats", headers={"x-tessera-replica": "nobody"})
    assert (answer.status_code, answer.json()["error"]["message"]) == (503, "no replica named 'nobody'")


async def test_clearing_clears_everywhere(cluster, stand_ins):
    all_answer(stand_ins, JSONResponse({"cleared": 3}))
    answer = (await cluster.client.post("/v1/cache/clear", json={"namespace": "n"})).json()
    assert answer["cleared"] == 6
    assert answer["replicas"]["a"] == {"status": 200, "answer": {"cleared": 3}}
    assert [body for _, body in cluster.asked] == [b'{"namespace":"n"}'] * 2


LONG = b'{"cleared": 3}' + b" " * 1_000_000
NONSENSE = [b"[]", b'{"cleared": "x"}', b'{"cleared": NaN}', b'{"a": 1e999}', b'{"a": "\\ud800"}', b"[" * 100_000, LONG]


@pytest.mark.parametrize("encoding", ["identity", "gzip"])
@pytest.mark.parametrize("body", NONSENSE, ids=range(len(NONSENSE)))
async def test_an_answer_that_is_nonsense_or_too_long_is_that_replicas_failure(cluster, stand_ins, body, encoding):
    """Also when packed."""
    packed = gzip.compress(body) if encoding == "gzip" else body
    headers = {"content-encoding": encoding}
    stand_ins[0].answer = Response(packed, headers=headers, media_type="application/json")
    stand_ins[1].answer = JSONResponse({"cleared": 3})
    answer = await cluster.client.post("/v1/cache/clear", json={"namespace": "n"})
    assert answer.status_code == 502
    assert {name: each["status"] for name, each in answer.json()["replicas"].items()} == {"a": 502, "b": 200}


async def test_a_probe_whose_answer_does_not_end_holds_up_no_news(cluster, stand_ins):
    async def is_known():
        return "c" in await cluster.names()

    async def drip(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(20):
            await send({"type": "http.response.body", "body": b" ", "more_body": True})
            await asyncio.sleep(0.5)

    stand_ins[0].health = drip
    await cluster.registry.leave(cluster.replicas[0].id)
    await asyncio.sleep(1.5)  # it is probed
    await cluster.registry.beat(Replica("c" * 12, "c", "http://127.0.0.1:9", ("m",), "f"))
    await eventually(is_known)


@pytest.mark.parametrize(("statuses", "status"), [((200, 404), 200), ((404, 404), 404), ((200, 500), 500)])
@pytest.mark.parametrize("method", ["DELETE", "PATCH"])
async def test_deleting_and_pinning_go_wherever_the_chunk_is(cluster, stand_ins, method, statuses, status):
    for stand_in, number in zip(stand_ins, statuses, strict=True):
        stand_in.answer = JSONResponse({}, number)
    answer = await cluster.client.request(method, "/v1/rag/chunks/00ff", json={"pinned": True})
    assert answer.status_code == status
    assert [body for _, body in cluster.asked] == [b'{"pinned":true}'] * 2


async def test_who_has_not_sealed_a_heartbeat_gets_no_request(redis_server):
    """A writer to Redis can't redirect requests, with their texts and keys."""
    async with Cluster(redis_server, StandIn("real")).running(peer_secret="the replicas' secret") as cluster:
        for key in (None, PeerKey("another secret")):
            forger = RedisRegistry(redis_server.url, key, timeout_s=1)
            await forger.beat(Replica("f" * 12, "other", "http://127.0.0.1:9", ("m",), "f"))
            await asyncio.sleep(1.5)  # the directory is read once a second
            assert await cluster.names() == ["real"]
            await forger.close()
        assert (await ask(cluster)).json() == {"from": "real"}
        assert (await cluster.about())["registry"]["invalid_entries"] > 0


async def test_pages_of_other_sites_get_no_further_and_the_routers_own_is_no_other_to_replicas(cluster):
    """The replicas without keys, too, look where a request comes from."""
    foreign = await cluster.client.post(PATH, json=ASKED, headers={"origin": "https://evil.example"})
    assert (foreign.status_code, foreign.json()["error"]["reason"]) == (403, "cross_site")
    assert not cluster.asked
    own = {"origin": cluster.url, "sec-fetch-site": "same-origin"}
    assert (await cluster.client.post(PATH, json=ASKED, headers=own)).status_code == 200
    ((scope, _),) = cluster.asked
    assert not {b"origin", b"sec-fetch-site"} & {name for name, _ in scope["headers"]}


@pytest.mark.parametrize(
    ("path", "status"), [("/peer/chunks/aa", 404), ("/web/%2e%2e/v1/rag/chat", 400), ("/v1//rag/chat", 400)]
)
async def test_paths_of_peers_and_those_that_could_be_another_go_to_no_replica(cluster, path, status):
    assert (await cluster.client.post(path)).status_code == status
    assert not cluster.asked


async def test_without_a_replica_there_is_the_page_and_health_says_so(redis_server):
    async with Cluster(redis_server).running() as cluster:

        async def is_healthy():
            return (await cluster.client.get("/health")).status_code == 200

        page = await cluster.client.get("/")
        assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
        answer = await ask(cluster)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert answer.json()["error"]["message"] == "no replica can be reached"
        assert not await is_healthy()
        with served(StandIn("a")) as url:
            await cluster.registry.beat(Replica("a" * 12, "a", url, (), ""))
            await eventually(is_healthy)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"chunks": 5}', b'{"chunks": [5, {}, null]}', b"\xff"])
async def test_a_body_that_is_nonsense_is_the_replicas_to_refuse(cluster, body):
    assert (await cluster.client.post(PATH, content=body)).status_code == 200


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_router_exits_with_0(sent, tmp_path):
    router = ServerProcess(tmp_path / "router.log", "--registry", "redis://127.0.0.1:1/0", serve=("app.cli", "route"))
    until_listening = httpx.HTTPTransport(retries=10)  # a second and more between the last ones
    try:
        with httpx.Client(transport=until_listening, base_url=router.url) as client:
            assert client.get("/health").status_code == 503
    finally:
        status = router.stop(sent)
    assert status == 0


async def test_a_web_socket_is_refused_in_words(cluster):
    """With the status and message of a refusal, before the connection is upgraded; the router goes on."""
    with pytest.raises(InvalidStatus) as refused:
        async with connect(cluster.url.replace("http:", "ws:") + "/v1/realtime"):
            pass
    error = json.loads(refused.value.response.body)["error"]
    assert (refused.value.response.status_code, error["reason"]) == (400, "not_implemented")
    assert "connect to one of the replicas" in error["message"]
    assert (await cluster.client.get("/health")).status_code == 200
