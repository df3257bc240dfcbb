# SPDX-License-Identifier: Apache-2.0
"""Two real replicas, a real router and a real Redis."""

import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from pydantic import SecretStr
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from app.access.middleware import AccessMiddleware
from app.documents.request_documents import wanted_documents
from machine.server_process import ROOT, free_port, group_members
from replicas.peer_file import FINGERPRINT_HEADER
from replicas.registry import Replica
from replicas.signing import HEADER, PeerAuth, PeerKey
from tests.engine.conftest import ALWAYS_FETCHING, COMMON
from tests.engine.server import TesseraServer
from tests.processes import frozen, started
from tests.redis_server import RedisServer
from tests.serving import served
from tests.support.routers import ASKED, ROUTE, Router, statuses, words
from tests.support.waiting import until

LEASE_S = 2
SECRET = "of these replicas alone"


class Cluster:
    """The processes of one module's tests."""

    def __init__(self, stack: ExitStack, folder: Path, model: Path) -> None:
        """`stack` ends every process."""
        self._stack = stack
        self.folder = folder
        self.redis = RedisServer(folder)
        stack.callback(self.redis.stop)
        self._model = model
        self._numbers = itertools.count()
        self.replicas = {name: self.start_replica(name) for name in "ab"}
        for replica in self.replicas.values():
            replica.wait_ready()
        log, registry = folder / "router.log", ("--registry", self.redis.url)
        self.router = Router(log, *registry, serve=ROUTE)
        stack.callback(self.router.stop)
        self.router.wait_ready()
        self.router.wait_for(*self.replicas)

    def start_replica(self, name: str, *flags: str) -> TesseraServer:
        registry = ("--registry", self.redis.url, "--replica-name", name)
        log = self.folder / f"{name}-{next(self._numbers)}.log"
        # A machine that runs several tests at once may keep the loop or Redis waiting.
        limits = {"lease_s": LEASE_S, "timeout_s": 2}
        environment = {"TESSERA_PEER_SECRET": SECRET, "REGISTRY": json.dumps(limits)}
        model = (str(self._model), "--dtype", "float32")
        flags = (*COMMON, *registry, *flags)
        replica = TesseraServer(log, *model, *flags, environment=environment, serve=ALWAYS_FETCHING)
        self._stack.callback(replica.stop)
        return replica

    def wait_claimed(self, *documents: Any) -> None:
        """Waits until the registry knows who has these documents."""
        wanted = wanted_documents("/v1/rag/chat", {"chunks": list(documents), "question": "?"})
        keys = [b"tessera:d:" + each.key.digest for each in wanted]
        until(lambda: self.redis.client.exists(*keys) == len(keys))

    def ask(self, *chunks: str, **fields: Any) -> dict[str, Any]:
        response = self.router.client.post("/v1/rag/chat", json={"chunks": chunks, **ASKED, **fields})
        assert response.status_code == 200, response.text
        return {**response.json(), "replica": response.headers["x-tessera-replica"]}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, model_path: Callable[[str], Path]) -> Iterator[Cluster]:
    with ExitStack() as stack:
        yield Cluster(stack, tmp_path_factory.mktemp("cluster"), model_path("tiny-llama"))


@pytest.fixture
def load(cluster: Cluster, text: Callable[[int], str]) -> Callable[[], AbstractContextManager[list[Any]]]:
    """Background load of some twenty requests per second; yields outcomes. Equal requests must get equal answers."""
    contents = [[text(300) for _ in range(3)] for _ in range(12)]
    known = {number: words(cluster.ask(*chunks)) for number, chunks in enumerate(contents)}

    @contextmanager
    def run() -> Iterator[list[Any]]:
        ended: list[Any] = []
        over = threading.Event()

        def send(seed: int) -> None:
            randomly = random.Random(seed)
            while not over.wait(0.2):
                number = randomly.randrange(len(contents))
                chunks = randomly.sample(contents[number], 3)
                try:
                    answer = cluster.ask(*chunks)
                    ended.append("right" if words(answer) == known[number] or chunks != contents[number] else "wrong")
                except (AssertionError, httpx.HTTPError, KeyError) as error:
                    ended.append(repr(error))

        with ThreadPoolExecutor(4) as threads:
            sent = [threads.submit(send, seed) for seed in range(4)]
            try:
                yield ended
            finally:
                over.set()
                for each in sent:
                    each.result()

    return run


def test_documents_are_found_again_in_any_order_though_there_are_two_replicas(cluster, text):
    sets = [[text(600) for _ in range(3)] for _ in range(8)]
    first = [cluster.ask(*chunks) for chunks in sets]
    assert {answer["replica"] for answer in first} == {"a", "b"}
    cluster.wait_claimed(*(chunk for chunks in sets for chunk in chunks))
    for chunks, before in zip(sets, first, strict=True):
        again = cluster.ask(*chunks)
        assert (again["replica"], statuses(again)) == (before["replica"], ["hit"] * 3)
        assert words(again) == words(before)
        turned = cluster.ask(*reversed(chunks))
        assert (turned["replica"], statuses(turned)) == (before["replica"], ["hit"] * 3)


def test_an_id_is_known_to_whom_the_router_asks(cluster, text):
    ids = [{"id": f"id-{number}"} for number in range(4)]
    for chunk in ids:
        response = cluster.router.client.post("/v1/rag/chunks", json={"chunks": [{**chunk, "text": text(100)}]})
        assert json.loads(response.text.splitlines()[-1])["summary"]["filled"] == 1
    cluster.wait_claimed(*ids)
    for chunk in ids:
        answer = cluster.router.client.post("/v1/rag/chat", json={"chunks": [chunk], "question": "?", "max_tokens": 1})
        assert answer.status_code == 200, answer.text


def test_what_one_replica_has_the_other_fetches(cluster, text):
    chunks = [text(900), text(500)]
    a, b = cluster.replicas["a"], cluster.replicas["b"]
    first = a.chat(chunks=chunks, **ASKED)
    cluster.wait_claimed(*chunks)
    second = b.chat(chunks=chunks, **ASKED)
    assert [(chunk["status"], chunk.get("origin")) for chunk in second["cache"]["chunks"]] == [("fetched", "a")] * 2
    assert words(second) == words(first)
    turned = [server.chat(chunks=chunks[::-1], **ASKED) for server in (a, b)]
    assert [statuses(answer) for answer in turned] == [["hit"] * 2] * 2
    assert words(turned[0]) == words(turned[1])
    assert b.stats()["counters"]["fetches"]["fetched"] == 2


def test_what_both_want_at_once_one_of_them_computes(cluster, text):
    chunks = [text(2000) for _ in range(2)]
    with ThreadPoolExecutor(2) as threads:
        both = list(threads.map(lambda server: server.chat(chunks=chunks, **ASKED), cluster.replicas.values()))
    assert Counter(statuses(both[0]) + statuses(both[1])) == {"fetched": 2, "filled": 2}
    assert words(both[0]) == words(both[1])


def test_a_peer_that_lies_is_not_believed(cluster, text):
    """A peer with the secret and the right fingerprint sends another document's KV, damaged KV, or none."""
    a = cluster.replicas["a"]
    (other,) = a.chat(chunks=[text(400)], **ASKED)["cache"]["chunks"]
    me = next(each for each in cluster.router.cluster()["replicas"] if each["name"] == "a")
    key, headers = PeerKey(SECRET), {FINGERPRINT_HEADER: me["fingerprint"]}
    file = a.client.get(f"/peer/chunks/{other['key']}?part=0", headers=headers, auth=PeerAuth(key)).content
    damaged = bytearray(file)
    damaged[-100] ^= 1
    lies = {"of another": file, "damaged": bytes(damaged), "nothing": b"", "half": file[: len(file) // 2]}
    told: list[str] = []

    async def answer(request: Request) -> Response:
        told.append(lie)
        return Response(lies[lie])

    liars = Starlette(routes=[Route("/peer/chunks/{key}", answer)])
    with served(AccessMiddleware(liars, None, SecretStr(SECRET))) as url:
        liar = Replica("ff" * 6, "liar", url, tuple(me["models"]), me["fingerprint"], load=1000)

        def is_told(lie: str) -> bool:
            """Whether a request for a document that the liar claims came to it; its answer is right anyhow."""
            heartbeat = key.seal("heartbeat", json.dumps(liar.to_dict()).encode())
            cluster.redis.client.set("tessera:r:" + liar.id, heartbeat, px=120_000)
            cluster.redis.client.sadd("tessera:replicas", liar.id)
            document = text(400)
            wanted = wanted_documents("/v1/rag/chat", {"chunks": [document], "question": "?"})
            for digest in [each.key.digest for each in wanted]:
                cluster.redis.client.hset(b"tessera:d:" + digest, bytes.fromhex(liar.id), bytes(4))
            answered = cluster.replicas["b"].chat(chunks=[document], **ASKED)
            assert statuses(answered) == ["filled"]
            assert words(answered) == words(a.chat(chunks=[document], **ASKED, cache={"mode": "chunked"}))
            return lie in told

        for lie in lies:
            until(partial(is_told, lie))  # replicas poll the registry once a second
    cluster.redis.client.delete("tessera:r:" + liar.id)


@pytest.mark.parametrize("secret", [None, "wrong", SECRET])
def test_peers_without_the_secret_get_nothing(cluster, secret):
    """Nor with it, if they send it instead of signing with it."""
    for path in ("/peer/chunks/00?part=0", "/peer/chunks/" + "00" * 16 + "?part=0"):
        signed = PeerKey(secret or "wrong").sign("GET", path.replace("part=0", "part=1"))
        headers = {"authorization": f"Bearer {secret}", HEADER: signed} if secret else {}
        answer = cluster.replicas["a"].client.get(path, headers=headers)
        assert (answer.status_code, "secret" in answer.text) == (403, True)
    assert cluster.router.client.get("/peer/chunks/00", params={"part": 0}).status_code == 404


REDIS_FAULTS = ("restarting", "emptied", "hanging", "full", "stale")  # the last leaves claims that nobody makes again


@pytest.mark.parametrize("fault", ["killed", *(pytest.param(name, marks=pytest.mark.matrix) for name in REDIS_FAULTS)])
def test_whatever_becomes_of_redis_requests_are_answered_and_it_is_told_again(cluster, load, fault):
    redis, router = cluster.redis, cluster.router

    def claims() -> int:
        return sum(1 for _ in redis.client.scan_iter("tessera:d:*", count=10_000))

    told = claims()
    with load() as ended:
        until(lambda: len(ended) >= 8)
        if fault == "killed":
            redis.stop()
            answered = len(ended)
            until(lambda: len(ended) >= answered + 8)
            redis.start()
        elif fault == "emptied":
            redis.client.flushall()
        elif fault == "hanging":
            with redis.frozen():
                time.sleep(4)
        elif fault == "full":
            with redis.configured(maxmemory="1"):
                time.sleep(LEASE_S + 2)
        elif fault == "restarting":
            for _ in range(20):
                redis.stop()
                time.sleep(0.5)
                redis.start()
                time.sleep(0.5)
        else:
            pretend(redis)
        until(lambda: router.cluster()["registry"]["up"] and claims() >= told, seconds=10)
        router.wait_for("a", "b", seconds=10)
        answered = len(ended)
        until(lambda: len(ended) >= answered + 8)
    assert Counter(ended) == {"right": len(ended)}


def pretend(redis: RedisServer) -> None:
    """Writes wrong claims, of existing and unknown replicas, and malformed entries."""
    living = [bytes.fromhex(member.decode()) for member in redis.client.smembers("tessera:replicas")]
    pipe = redis.client.pipeline(transaction=False)
    for key in list(redis.client.scan_iter("tessera:d:*")):
        for replica in [*living, b"nobody"]:
            pipe.hset(key, replica, (10**6 << 2 | 1).to_bytes(4, "little"))
        pipe.hset(key, b"?", b"?")
    for _ in range(50_000):
        pipe.hset(b"tessera:d:" + random.randbytes(16), b"nobody", bytes(4))
    pipe.sadd("tessera:replicas", "00", "zz", *(random.randbytes(6).hex() for _ in range(100)))
    pipe.set("tessera:r:00", "{}")
    pipe.execute()


@pytest.mark.matrix
def test_a_killed_replica_is_replaced_and_nobody_is_refused(cluster, load, text):
    dying = cluster.replicas["b"]
    with load() as ended:
        until(lambda: len(ended) >= 8)
        os.killpg(dying.process.pid, signal.SIGKILL)
        until(lambda: cluster.router.names() == ["a"], seconds=LEASE_S + 5)
    assert Counter(ended) == {"right": len(ended)}
    dying.stop()
    start_again(cluster, text)


@pytest.mark.matrix
def test_nobody_waits_for_a_replica_that_hangs(cluster, load):
    with load() as ended:
        until(lambda: len(ended) >= 8)
        with frozen(cluster.replicas["b"].process):
            until(lambda: cluster.router.names() == ["a"], seconds=LEASE_S + 5)
            before = len(ended)
            until(lambda: len(ended) >= before + 8)
        cluster.router.wait_for("a", "b")
    assert Counter(ended) == {"right": len(ended)}


@pytest.mark.matrix
def test_a_stopping_replica_sends_its_clients_to_the_others(cluster, load, text):
    with load() as ended:
        until(lambda: len(ended) >= 8)
        assert cluster.replicas["b"].stop() == 0
        until(lambda: cluster.router.names() == ["a"], seconds=LEASE_S + 5)
    assert Counter(ended) == {"right": len(ended)}
    start_again(cluster, text)


def start_again(cluster: Cluster, text: Callable[[int], str]) -> None:
    """A new replica gets requests. Without load during its start, for which two cores are too few."""
    cluster.replicas["b"] = cluster.start_replica("b").wait_ready()
    cluster.router.wait_for("a", "b")
    until(lambda: cluster.ask(text(600))["replica"] == "b")  # no replica has these documents


# `tessera cluster`: the processes of docker/compose.yaml on this machine


@pytest.mark.matrix
def test_it_serves_starts_a_dead_replica_again_and_ends_altogether(model_path, tmp_path, redis_server):
    port, said = free_port(), tmp_path / "said.txt"
    model = (str(model_path("tiny-llama")), "--dtype", "float32", *COMMON)
    command = [sys.executable, "-m", "app.cli", "cluster", *model, "--port", str(port)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TESSERA_HOME": str(tmp_path)}
    with (
        said.open("wb") as output,
        started(command, cwd=tmp_path, env=environment, stdout=output, stderr=output) as process,
    ):
        until(lambda: "Try:" in said.read_text() or process.poll() is not None, seconds=300)
        assert process.poll() is None, said.read_text()
        url = f"http://127.0.0.1:{port}"
        replicas = httpx.get(f"{url}/v1/cluster").json()["replicas"]
        assert [replica["name"] for replica in replicas] == ["replica-1", "replica-2"]
        assert replicas[0]["fingerprint"] == replicas[1]["fingerprint"] != ""
        answer = httpx.post(f"{url}/v1/rag/chat", json={"chunks": ["a"], "question": "?", "max_tokens": 1}, timeout=60)
        assert answer.json()["cache"]["mode"] == "chunked"
        pids = {
            name: child_at(process.pid, int(re.search(rf"{name} at http://127.0.0.1:(\d+)", said.read_text())[1]))
            for name in ("replica-1", "replica-2", "router")
        }
        os.kill(pids["replica-2"], signal.SIGKILL)
        until(lambda: "starting replica-2 again" in said.read_text(), seconds=60)
        gone = replicas[1]["id"]
        until(lambda: names(url) == ["replica-1", "replica-2"] and gone not in ids(url), seconds=300)
        pids["replica-2 again"] = child_at(process.pid, int(httpx.URL(replicas[1]["url"]).port))
        os.kill(pids["router"], signal.SIGTERM)
        assert process.wait(90) == 1
    assert f"replica-2 has ended with -9; its log is {tmp_path}/cluster/replica-2.previous.log" in said.read_text()
    assert f"the router has ended with 0; its log is {tmp_path}/cluster/router.log" in said.read_text()
    # A replica's helpers (multiprocessing's resource tracker) notice its end a moment later.
    until(lambda: not any(group_members(pid) for pid in pids.values()), seconds=30)


@pytest.mark.matrix
def test_what_is_wrong_with_a_replica_is_said(tmp_path, redis_server):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TESSERA_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "app.cli", "cluster", "--replicas", "1", "--no-such-flag", "--port", "0"]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 2
    assert "replica-1 didn't start" in ended.stderr
    assert "--no-such-flag" in ended.stderr


def names(url: str) -> list[str]:
    return [replica["name"] for replica in httpx.get(f"{url}/v1/cluster").json()["replicas"]]


def ids(url: str) -> list[str]:
    return [replica["id"] for replica in httpx.get(f"{url}/v1/cluster").json()["replicas"]]


def child_at(parent: int, port: int) -> int:
    """The child process that serves this port; the parent's command line may name the same port."""
    children = psutil.Process(parent).children(recursive=True)
    return next(child.pid for child in children if {"app.cli", str(port)} <= set(child.cmdline()))
