# SPDX-License-Identifier: Apache-2.0
"""Two real engine replicas in Ray Serve and a real Redis, on one machine."""

import json
import random
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("ray.serve", reason="needs the extra ray", exc_type=ImportError)

import ray
from ray import serve

from app.ray_serve import build
from machine.server_process import ROOT, free_port
from tests.redis_server import RedisServer
from tests.support.routers import statuses, words
from tests.support.waiting import until

pytestmark = pytest.mark.matrix
START_TIMEOUT_S = 240
REPLICA = "x-tessera-replica"
FLAGS = {"dtype": "float32", "enforce_eager": True, "max_model_len": 8192}
FLAGS |= {"kv_cache_memory_bytes": "256M", "chunk_cache_memory": "256MiB"}
ENVIRONMENT = {
    "PYTHONPATH": str(ROOT),
    "RAY_worker_niceness": "0",  # by default Ray's workers run at low priority
    "RAY_AUTH_MODE": "disabled",  # by default Ray writes a token into the home folder
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_NO_USAGE_STATS": "1",
}


class RayCluster:
    """A local Ray with Tessera's application; its processes carry its folder in their environment."""

    def __init__(self, stack: ExitStack, folder: Path, model: Path) -> None:
        """`stack` ends every process."""
        self.redis = RedisServer(folder)
        stack.callback(self.redis.stop)
        self.folder = tempfile.mkdtemp(prefix="ray-")  # short: Ray's sockets are in it
        stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
        stack.callback(self.stop)
        with pytest.MonkeyPatch.context() as patch:
            for name, value in {**ENVIRONMENT, "TEST_RAY_FOLDER": self.folder}.items():
                patch.setenv(name, value)
            quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": "error"}
            ray.init(num_cpus=2, object_store_memory=100 << 20, _temp_dir=self.folder, **quiet)
        port = free_port()
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        small = {"ray_actor_options": {"num_cpus": 0.5}}
        asked = {"model": str(model), "num_replicas": 2, "registry": self.redis.url, "flags": FLAGS}
        serve.run(build({**asked, "engine": small, "ingress": small}))
        self.client = stack.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120))
        until(lambda: len(self.names()) == 2)

    def names(self) -> set[str]:
        """The replicas in the registry."""
        beats = [self.redis.client.get(key) for key in self.redis.client.scan_iter("tessera:r:*")]
        return {json.loads(beat)["name"] for beat in beats if beat}

    def running(self) -> int:
        """Number of running replicas, according to Ray."""
        states = serve.status().applications["default"].deployments["Engine"].replica_states
        return states.get("RUNNING", 0)

    def ask(self, *chunks: str, **fields: Any) -> dict[str, Any]:
        body = {"chunks": chunks, "question": "What?", "max_tokens": 4, "temperature": 0, "logprobs": True, **fields}
        response = self.client.post("/v1/rag/chat", json=body)
        assert response.status_code == 200, response.text
        return {**response.json(), "replica": response.headers[REPLICA]}

    def metric(self, name: str, replica: str) -> float:
        lines = self.client.get("/metrics", headers={REPLICA: replica}).text.splitlines()
        values = [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name}{{", f"{name} "))]
        assert values, f"no metric {name}"
        return sum(values)

    def kill(self, replica: str) -> None:
        ray.kill(ray.get_actor(f"SERVE_REPLICA::default#Engine#{replica}", namespace="serve"))

    def processes(self) -> list[str]:
        """Names of its processes that are still alive."""
        mark = f"TEST_RAY_FOLDER={self.folder}".encode()
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (process / "environ").read_bytes().split(b"\0"):
                    found.append((process / "comm").read_text().strip())
            except OSError:
                continue
        return found

    def stop(self) -> None:
        if ray.is_initialized():
            serve.shutdown()
            ray.shutdown()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, model_path: Callable[[str], Path]) -> Iterator[RayCluster]:
    with ExitStack() as stack:
        yield RayCluster(stack, tmp_path_factory.mktemp("ray"), model_path("tiny-llama"))


def test_documents_are_found_again_in_any_order_though_there_are_two_replicas(cluster, text):
    sets = [[text(700) for _ in range(3)] for _ in range(12)]
    first = [cluster.ask(*chunks) for chunks in sets]
    used = {answer["replica"] for answer in first}
    until(lambda: used == cluster.names())  # heartbeats may be late on a busy machine
    time.sleep(1)  # claims are published ten times a second
    hits: Counter[bool] = Counter()
    for chunks, before in zip(sets, first, strict=True):
        again, turned = cluster.ask(*chunks), cluster.ask(*reversed(chunks))
        assert words(again) == words(before)
        for answer in (again, turned):
            hits[answer["replica"] == before["replica"] and statuses(answer) == ["hit"] * 3] += 1
    assert hits[True] >= 0.9 * hits.total()


def test_a_stream_is_as_the_replica_sends_it(cluster, text):
    chunks, fields = [text(700)], {"max_tokens": 200, "ignore_eos": True}
    whole = cluster.ask(*chunks, **fields)
    body = {"chunks": chunks, "question": "What?", "temperature": 0, "logprobs": True, "stream": True, **fields}
    with cluster.client.stream("POST", "/v1/rag/chat", json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        pieces = list(answer.iter_raw())
    assert len(pieces) > 5
    *events, done = [line[6:] for line in b"".join(pieces).decode().split("\n") if line.startswith("data: ")]
    assert done == "[DONE]"
    choices = [choice for event in events for choice in json.loads(event)["choices"] if choice.get("logprobs")]
    tokens = [token for choice in choices for token in choice["logprobs"]["content"]]
    assert words({"choices": [{"logprobs": {"content": tokens}}]}) == words(whole)


def test_a_client_that_leaves_frees_the_replica(cluster, text):
    body = {"chunks": [text(700)], "question": "?", "max_tokens": 7000, "ignore_eos": True}
    with cluster.client.stream("POST", "/v1/rag/chat", json={**body, "stream": True}) as answer:
        name = answer.headers[REPLICA]
        next(answer.iter_raw())
    until(lambda: cluster.metric("vllm:num_requests_running", name) == 0 == cluster.metric("tessera_leases", name))
    with pytest.raises(httpx.ReadTimeout):
        cluster.client.post("/v1/rag/chat", json=body, timeout=1)
    until(lambda: not sum(cluster.metric("vllm:num_requests_running", name) for name in cluster.names()))


def test_a_killed_replica_is_replaced_and_nobody_is_refused(cluster, text):
    contents = [[text(300) for _ in range(2)] for _ in range(8)]
    known = [words(cluster.ask(*chunks)) for chunks in contents]
    before, over, ended = cluster.names(), threading.Event(), list[str]()

    def send(seed: int) -> None:
        randomly = random.Random(seed)
        while not over.is_set():
            number = randomly.randrange(len(contents))
            try:
                right = words(cluster.ask(*contents[number])) == known[number]
                ended.append("right" if right else "wrong")
            except (AssertionError, httpx.HTTPError, KeyError) as error:
                ended.append(repr(error))
            time.sleep(0.2)  # the new replica needs the cores, too

    with ThreadPoolExecutor(2) as threads:
        sent = [threads.submit(send, seed) for seed in range(2)]
        try:
            dying = killed_amid_a_stream(cluster, contents[0])
            answered = len(ended)
            until(lambda: len(ended) >= answered + 6, 30)
            until(lambda: cluster.running() == 2 and len(cluster.names() - {dying}) == 2, START_TIMEOUT_S)
        finally:
            over.set()
            for each in sent:
                each.result()
    assert Counter(ended) == {"right": len(ended)}
    new, *_ = cluster.names() - before  # on a busy machine Ray may declare another replica dead, too
    assert cluster.client.get("/health", headers={REPLICA: new}).status_code == 200


def killed_amid_a_stream(cluster: RayCluster, chunks: list[str]) -> str:
    """Kills the replica that sends a stream, which must fail visibly; returns its name."""
    body = {"chunks": chunks, "question": "?", "max_tokens": 7000, "ignore_eos": True, "stream": True}
    with cluster.client.stream("POST", "/v1/rag/chat", json=body) as answer:
        pieces = answer.iter_raw()
        next(pieces)
        cluster.kill(answer.headers[REPLICA])
        with pytest.raises(httpx.RemoteProtocolError):
            list(pieces)
    return answer.headers[REPLICA]


def test_a_shutdown_leaves_no_process(cluster):
    """The file's last test, since it stops the cluster."""
    names = cluster.processes()
    assert any(name.startswith("VLLM") for name in names), names
    serve.shutdown()
    assert cluster.redis.client.keys("tessera:r:*") == []
    ray.shutdown()
    until(lambda: not cluster.processes(), 30)
