# SPDX-License-Identifier: Apache-2.0
"""The router from the perspective of clients, replicas and operators."""

import asyncio
import json
import random
import signal
import subprocess
import sys
from dataclasses import replace

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

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
    say_busy,
    say_hello,
    serving,
    streaming,
    wait_for_disconnect,
)
from tests.support.waiting import eventually

ASKED = {"system": "S", "chunks": ["one", "two"], "question": "?"}


@pytest.fixture
def stand_ins():
    return [StandIn("a"), StandIn("b")]


@pytest.fixture
async def cluster(redis_server, stand_ins):
    async with Cluster(redis_server, *stand_ins).running() as cluster:
        yield cluster


async def claim(cluster, number, body=ASKED, path="/v1/rag/chat"):
    holding = Holding(Tier.DEVICE, 5000)
    changes = {document.key: holding for document in wanted_documents(path, {**body})}
    await cluster.registry.publish(cluster.replicas[number].id, changes)


@pytest.mark.parametrize("number", [0, 1])
async def test_a_request_goes_to_who_holds_its_documents(cluster, number):
    await claim(cluster, number)
    for chunks in (["one", "two"], ["two", "one"], ["one"]):
        answer = await cluster.client.post("/v1/rag/chat", json={**ASKED, "chunks": chunks})
        assert answer.json() == {"from": "ab"[number]}
        assert answer.headers["x-tessera-replica"] == "ab"[number]
    decisions = (await cluster.client.get("/v1/cluster")).json()["decisions"]
    assert [decision["held_tokens"] for decision in decisions] == [10_000, 10_000, 5000]
    assert await cluster.metric("tessera_router_held_tokens_total") == 25_000
    assert await cluster.metric("tessera_router_requests_total", replica="ab"[number], status="200") == 3


@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/models"), ("HEAD", "/v1/models"), ("GET", "/v1/models/")])
async def test_strict_clients_get_plain_answers(cluster, stand_ins, method, path):
    """One `Date` and one `Server`, no redirection to a replica's own address, `HEAD` as `GET`."""
    answer = await cluster.client.request(method, path)
    assert answer.status_code == 200
    assert [len(answer.headers.get_list(name)) for name in ("date", "server")] == [1, 1]
    (asked,) = [scope for each in stand_ins for scope, _ in each.requests]
    assert (asked["method"], asked["path"]) == ("GET", "/v1/models")
    assert bool(answer.content) == (method == "GET")


async def test_what_is_asked_for_in_another_way_finds_the_same_replica(cluster):
    await claim(cluster, 1)
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "?"}]
    answer = await cluster.client.post("/v1/chat/completions", json={"messages": messages, "documents": ["one", "two"]})
    assert answer.json() == {"from": "b"}


async def test_the_turns_of_a_conversation_meet(cluster):
    at = []
    for number in range(20):
        turns = [{"role": "user", "content": f"{number} {'word ' * 400}"}]
        for _ in range(3):
            answer = await cluster.client.post("/v1/chat/completions", json={"messages": turns})
            at.append((number, answer.json()["from"]))
            turns += [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": "And then?"}]
    assert len(set(at)) == 20
    assert {name for _, name in at} == {"a", "b"}
    assert (await cluster.client.get("/v1/cluster")).json()["decisions"] == []


async def test_cold_requests_with_the_same_documents_meet(cluster):
    for first in range(20):
        chunks = [f"{first}-{i}" for i in range(4)]
        answers = [
            (await cluster.client.post("/v1/rag/chat", json={**ASKED, "chunks": given})).json()["from"]
            for given in (chunks, chunks[::-1])
        ]
        assert len(set(answers)) == 1


async def test_a_request_arrives_as_it_was_sent(cluster, stand_ins):
    body = bytes(random.Random(0).randbytes(100_000))
    headers = {
        "x-mine": "1",
        "authorization": "Bearer k",
        "connection": "x-hop",
        "x-hop": "1",
        "x-tessera-replica": "a",
    }
    await cluster.client.put("/some/p%20ath?q=%20a&b", content=body, headers=headers)
    ((scope, arrived),) = stand_ins[0].requests
    assert arrived == body
    assert (scope["method"], scope["raw_path"], scope["query_string"]) == ("PUT", b"/some/p%20ath", b"q=%20a&b")
    given = dict(scope["headers"])
    assert (given[b"x-mine"], given[b"authorization"]) == (b"1", b"Bearer k")
    assert b"x-hop" not in given
    assert b"x-tessera-replica" not in given


async def test_an_answer_passes_byte_for_byte(cluster, stand_ins):
    randomly = random.Random(0)
    pieces = [randomly.randbytes(randomly.choice([1, 10, 1000, 70_000])) for _ in range(50)]
    for stand_in in stand_ins:
        stand_in.answer = streaming(pieces)
    async with cluster.client.stream("POST", "/v1/rag/chat", json=ASKED) as answer:
        arrived = b"".join([piece async for piece in answer.aiter_raw()])
    assert arrived == b"".join(pieces)
    assert answer.headers["content-encoding"] == "gzip"
    assert answer.headers["x-own"] == "1"


@pytest.mark.parametrize("answer", [wait_for_disconnect, begin_and_wait])
async def test_a_client_that_leaves_is_gone_for_the_replica_too(cluster, stand_ins, answer):
    for stand_in in stand_ins:
        stand_in.answer = answer
    asking = asyncio.create_task(cluster.client.post("/v1/rag/chat", json=ASKED))
    await eventually(lambda: any(stand_in.requests for stand_in in stand_ins))
    assert await cluster.metric("tessera_router_load", replica="a") + await cluster.metric(
        "tessera_router_load", replica="b"
    )
    asking.cancel()
    await eventually(lambda: any(stand_in.disconnects for stand_in in stand_ins))

    async def nothing_is_left():
        loads = [await cluster.metric("tessera_router_load", replica=name) for name in "ab"]
        return loads == [0, 0]

    await eventually(nothing_is_left)


async def test_a_busy_replica_sends_its_requests_on(cluster, stand_ins):
    await claim(cluster, 0)
    stand_ins[0].answer = say_busy
    answer = await cluster.client.post("/v1/rag/chat", json=ASKED)
    assert answer.json() == {"from": "b"}
    stand_ins[1].answer = say_busy
    answer = await cluster.client.post("/v1/rag/chat", json=ASKED)
    assert answer.status_code == 503
    assert answer.json()["error"]["message"] == "b is busy"
    assert await cluster.metric("tessera_router_retries_total", reason="busy") == 2


async def test_other_errors_are_the_clients(cluster, stand_ins):
    async def refuse(stand_in, scope, receive, send):
        await send({"type": "http.response.start", "status": 500, "headers": []})
        await send({"type": "http.response.body", "body": b"broken"})

    for stand_in in stand_ins:
        stand_in.answer = refuse
    answer = await cluster.client.post("/v1/rag/chat", json=ASKED)
    assert (answer.status_code, answer.content) == (500, b"broken")
    assert sum(len(stand_in.requests) for stand_in in stand_ins) == 1


async def test_a_stream_that_breaks_does_not_look_whole(cluster, stand_ins):
    for stand_in in stand_ins:
        stand_in.answer = begin_and_break
    with pytest.raises(httpx.RemoteProtocolError):
        await cluster.client.post("/v1/rag/chat", json=ASKED)


async def test_without_redis_requests_still_meet(cluster, redis_server, stand_ins):
    redis_server.stop()
    seen = {(await cluster.client.post("/v1/rag/chat", json=ASKED)).json()["from"] for _ in range(5)}
    assert len(seen) == 1
    assert (await cluster.client.get("/v1/cluster")).json()["registry"]["up"] is False
    assert await cluster.metric("tessera_router_registry_up") == 0
    redis_server.start()
    await cluster.beat()
    await claim(cluster, 1)

    async def found():
        return (await cluster.client.post("/v1/rag/chat", json=ASKED)).json() == {"from": "b"}

    await eventually(found)


async def test_while_redis_hangs_only_one_request_waits_for_it(cluster, redis_server):
    with redis_server.frozen():
        await cluster.client.post("/v1/rag/chat", json=ASKED)
        before = await cluster.metric("tessera_router_registry_errors_total")
        await asyncio.gather(*(cluster.client.post("/v1/rag/chat", json=ASKED) for _ in range(50)))
        # The directory polls once a second.
        assert await cluster.metric("tessera_router_registry_errors_total") - before <= 2


async def test_replicas_that_only_the_registry_has_lost_stay(cluster, redis_server):
    def polls():
        return redis_server.client.info("commandstats")["cmdstat_smembers"]["calls"]

    redis_server.client.flushall()
    before = polls()
    await eventually(lambda: polls() >= before + 2)
    assert await cluster.names() == ["a", "b"]


async def test_a_replica_that_is_gone_is_forgotten_and_a_new_one_gets_requests(cluster):
    with serving(new := StandIn("c")) as url:
        replica = Replica("c" * 12, "c", url, ("m",), "f")
        await cluster.registry.beat(replica)

        async def gets_requests():
            await cluster.client.post("/v1/rag/chat", json={**ASKED, "chunks": [str(random.random())]})
            return bool(new.requests)

        await eventually(gets_requests)
        assert await cluster.names() == ["a", "b", "c"]
    for _ in range(20):
        answer = await cluster.client.post("/v1/rag/chat", json={**ASKED, "chunks": [str(random.random())]})
        assert answer.json()["from"] in "ab"

    async def is_forgotten():
        await cluster.beat()
        return await cluster.names() == ["a", "b"]

    await eventually(is_forgotten)


async def test_a_model_goes_to_who_serves_it(cluster):
    await cluster.registry.beat(replace(cluster.replicas[1], models=("other",)))

    async def is_known():
        replicas = (await cluster.client.get("/v1/cluster")).json()["replicas"]
        return [replica["models"] for replica in replicas] == [["m"], ["other"]]

    await eventually(is_known)
    for model, name in (("other", "b"), ("m", "a"), ("other", "b")):
        answer = await cluster.client.post("/v1/rag/chat", json={**ASKED, "model": model})
        assert answer.json() == {"from": name}


async def test_a_client_may_name_the_replica(cluster):
    for name in "abba":
        answer = await cluster.client.get("/v1/cache/stats", headers={"x-tessera-replica": name})
        assert answer.json() == {"from": name}
    answer = await cluster.client.get("/v1/cache/stats", headers={"x-tessera-replica": "nobody"})
    assert answer.status_code == 503
    assert answer.json()["error"]["message"] == "no replica named 'nobody'"


async def test_an_id_goes_to_who_has_it(cluster):
    body = {"chunks": [{"id": "d1"}], "question": "?"}
    await claim(cluster, 1, body)
    assert (await cluster.client.post("/v1/rag/chat", json=body)).json() == {"from": "b"}


async def test_clearing_clears_everywhere(cluster, stand_ins):
    async def cleared(stand_in, scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b'{"cleared": 3}'})

    for stand_in in stand_ins:
        stand_in.answer = cleared
    answer = (await cluster.client.post("/v1/cache/clear", json={"namespace": "n"})).json()
    assert answer["cleared"] == 6
    assert answer["replicas"]["a"] == {"status": 200, "answer": {"cleared": 3}}
    assert [body for stand_in in stand_ins for _, body in stand_in.requests] == [b'{"namespace":"n"}'] * 2


@pytest.mark.parametrize(("statuses", "status"), [((200, 404), 200), ((404, 404), 404), ((200, 500), 500)])
@pytest.mark.parametrize("method", ["DELETE", "PATCH"])
async def test_deleting_and_pinning_go_wherever_the_chunk_is(cluster, stand_ins, method, statuses, status):
    def answering(number):
        async def answer(stand_in, scope, receive, send):
            await send({"type": "http.response.start", "status": number, "headers": []})
            await send({"type": "http.response.body", "body": b"{}"})

        return answer

    for stand_in, number in zip(stand_ins, statuses, strict=True):
        stand_in.answer = answering(number)
    answer = await cluster.client.request(method, "/v1/rag/chunks/00ff", json={"pinned": True})
    assert answer.status_code == status
    assert [body for stand_in in stand_ins for _, body in stand_in.requests] == [b'{"pinned":true}'] * 2


@pytest.mark.parametrize("path", ["/web/../v1/rag/chat", "/web/%2e%2e/v1/rag/chat", "/v1//rag/chat"])
async def test_a_path_that_could_be_another_goes_to_no_replica(cluster, path):
    """As sent, which a client with less manners does."""
    url = httpx.URL(cluster.url)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\nconnection: close\r\n\r\n".encode())
    assert (await reader.readline()).split()[1] == b"400"
    writer.close()
    assert not any(stand_in.requests for stand_in in cluster.stand_ins)


async def test_who_has_not_sealed_a_heartbeat_gets_no_request(redis_server):
    """A writer to Redis can't redirect requests, with their texts and keys."""
    real, other = StandIn("real"), StandIn("other")
    async with Cluster(redis_server, real).running(peer_secret="the replicas' secret") as cluster:
        with serving(other) as url:
            for key in (None, PeerKey("another secret")):
                forger = RedisRegistry(redis_server.url, key, timeout_s=1)
                await forger.beat(Replica("f" * 12, "other", url, ("m",), "f"))
                await asyncio.sleep(1.5)  # the directory is read once a second
                assert await cluster.names() == ["real"]
                await forger.close()
            for _ in range(5):
                assert (await cluster.client.post("/v1/rag/chat", json=ASKED)).json() == {"from": "real"}
        assert (await cluster.client.get("/v1/cluster")).json()["registry"]["invalid_entries"] > 0
    assert other.requests == []


async def test_pages_of_other_sites_get_no_further_and_the_routers_own_is_no_other_to_replicas(cluster):
    """The replicas without keys, too, look where a request comes from."""
    foreign = await cluster.client.post("/v1/rag/chat", json=ASKED, headers={"origin": "https://evil.example"})
    assert (foreign.status_code, foreign.json()["error"]["reason"]) == (403, "cross_site")
    assert not any(stand_in.requests for stand_in in cluster.stand_ins)
    own = {"origin": cluster.url, "sec-fetch-site": "same-origin"}
    assert (await cluster.client.post("/v1/rag/chat", json=ASKED, headers=own)).status_code == 200
    ((scope, _),) = [asked for stand_in in cluster.stand_ins for asked in stand_in.requests]
    assert not {b"origin", b"sec-fetch-site"} & {name for name, _ in scope["headers"]}


async def test_replicas_do_not_ask_one_another_through_it(cluster):
    answer = await cluster.client.get("/peer/chunks/aa")
    assert (answer.status_code, answer.json()["error"]["reason"]) == (404, "not_found")


async def test_the_page_comes_from_the_router_itself(redis_server):
    async with Cluster(redis_server).running() as cluster:
        answer = await cluster.client.get("/")
        assert (answer.status_code, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")


async def test_health_says_whether_there_is_a_replica(redis_server):
    async with Cluster(redis_server).running() as cluster:
        answer = await cluster.client.post("/v1/rag/chat", json=ASKED)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert answer.json()["error"]["message"] == "no replica can be reached"
        assert (await cluster.client.get("/health")).status_code == 503
        with serving(stand_in := StandIn("a")) as url:
            stand_in.answer = say_hello
            await cluster.registry.beat(Replica("a" * 12, "a", url, (), ""))

            async def is_healthy():
                return (await cluster.client.get("/health")).status_code == 200

            await eventually(is_healthy)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'{"chunks": 5}', b'{"chunks": [5, {}, null]}', b"\xff"])
async def test_a_body_that_is_nonsense_is_the_replicas_to_refuse(cluster, body):
    assert (await cluster.client.post("/v1/rag/chat", content=body)).status_code == 200


def test_the_router_needs_no_engine():
    code = "import sys, app.cluster.router.command; print({'vllm', 'torch', 'transformers'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "set()"


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
    assert (refused.value.response.status_code, error["reason"]) == (501, "not_implemented")
    assert "connect to one of the replicas" in error["message"]
    assert (await cluster.client.get("/health")).status_code == 200
