# SPDX-License-Identifier: Apache-2.0
"""Killed processes: clients get an error, and no process or memory is left behind."""

import json
import os
import re
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.cores import all_cores
from tests.engine.server import TesseraServer, engine_core, named, shared_memory, wait_until_gone
from tests.processes import frozen
from tests.support.parallel import WORKERS
from tests.support.waiting import until

Text = Callable[[int], str]
StartServer = Callable[..., TesseraServer]
SLOW = ("--max-num-batched-tokens", "128")
WORKS_FOR_LONG = {"max_tokens": 6000, "temperature": 0, "ignore_eos": True}
STOPPING = "the server is stopping"
DIED = "The engine has died; the server ends."


@dataclass
class Asked:
    """A request with its response so far."""

    path: str
    body: dict[str, Any]
    status: int = 0
    text: str = ""
    broke_off: str = ""
    has_begun: threading.Event = field(default_factory=threading.Event)

    def run(self, url: str) -> None:
        try:
            with httpx.stream("POST", f"{url}{self.path}", json=self.body, timeout=300) as response:
                self.status = response.status_code
                for part in response.iter_text():
                    self.text += part
                    self.has_begun.set()
        except httpx.HTTPError as error:
            self.broke_off = type(error).__name__

    @property
    def is_stream(self) -> bool:
        return bool(self.body.get("stream")) or self.path == "/v1/rag/chunks"

    @property
    def error(self) -> str:
        return str(json.loads(self.text)["error"]["message"])


def requests(text: Text, model: str) -> list[Asked]:
    """Streams of every endpoint, whole answers, a request that waits for its chunk, and an ingestion."""
    rag = {"chunks": [text(200)], "question": "What?", **WORKS_FOR_LONG}
    chat = {"messages": [{"role": "user", "content": text(50)}], **WORKS_FOR_LONG}
    return [
        Asked("/v1/rag/chat", {**rag, "stream": True}),
        Asked("/v1/chat/completions", {**chat, "stream": True}),
        Asked("/v1/chat/completions", {**chat, "stream": True, "documents": [text(100)]}),
        Asked("/v1/completions", {"prompt": text(50), "stream": True, **WORKS_FOR_LONG}),
        Asked("/v1/messages", {**chat, "stream": True, "model": model}),
        Asked("/v1/responses", {"input": text(50), "stream": True, "max_output_tokens": 6000, "ignore_eos": True}),
        Asked("/v1/rag/chat", rag),
        Asked("/v1/chat/completions", chat),
        Asked("/v1/rag/chunks", {"chunks": [text(2000) for _ in range(300)]}),
        Asked("/v1/rag/chat", {**rag, "chunks": [text(2300) for _ in range(3)], "max_tokens": 1000}),
    ]


@contextmanager
def load(server: TesseraServer, text: Text) -> Iterator[list[Asked]]:
    """Yields running requests; waits for their ends."""
    asked = requests(text, server.model)
    threads = [threading.Thread(target=each.run, args=(server.url,)) for each in asked]
    for thread in threads:
        thread.start()
    for each in asked:
        assert not each.is_stream or each.has_begun.wait(300), each.path
    yield asked
    for thread in threads:
        thread.join()


def assert_told(asked: list[Asked]) -> None:
    """Asserts that each request ended with an error, an error event or a lost connection, never as complete."""
    for each in asked:
        if not each.is_stream:
            assert (each.status, each.error) == (503, DIED), each
        elif each.path == "/v1/rag/chunks":
            assert each.broke_off or json.loads(each.text.splitlines()[-1])["summary"]["failed"] > 0, each
        else:
            assert each.status == 200
            assert each.broke_off or '"error"' in each.text, each.text[-500:]
            assert '"finish_reason":"' not in each.text.replace('": ', '":'), each.text[-500:]
            assert not any(word in each.text for word in ("message_stop", "response.completed")), each.text[-500:]


def health(server: TesseraServer) -> tuple[int, str] | None:
    """Status and message; ``None`` without a server."""
    try:
        response = httpx.get(f"{server.url}/health", timeout=10)
    except httpx.TransportError:
        return None
    return response.status_code, response.json()["error"]["message"] if response.content else ""


def being_computed(server: TesseraServer) -> list[dict[str, Any]]:
    return server.get("/v1/rag/chunks", state="filling", limit=1000)["data"]


def num_connections(server: TesseraServer) -> int:
    connections = psutil.Process(server.process.pid).net_connections("tcp")
    return sum(each.status == psutil.CONN_ESTABLISHED and each.laddr.port == server.port for each in connections)


def test_an_engine_core_that_is_killed(mortal: TesseraServer, text: Text) -> None:
    """The server reports the error to all clients and exits with 1."""
    server, group = mortal, mortal.process.pid
    with load(server, text) as asked:
        engine_core(server).kill()
        assert server.process.wait(300) == 1
        assert health(server) is None
    assert_told(asked)
    wait_until_gone(group)
    said = [line for line in server.log.read_text().splitlines() if line.startswith("tessera: ")]
    assert re.fullmatch("tessera: the engine has died; its log is /.+/vllm/.+\\.log", said[-1])


@pytest.mark.matrix
@pytest.mark.skipif((os.cpu_count() or 1) < 4, reason="two workers wait for each other busily; nobody else has a turn")
def test_a_worker_that_is_killed(start: StartServer, text: Text) -> None:
    """As when out of memory. The server is set to stay, for requests after the engine's death."""
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH": "1"}
    with all_cores():
        server = start(*SLOW, *WORKERS["tensor parallel"], environment=environment).wait_ready()
    group, shared = server.process.pid, shared_memory(server.process.pid)
    assert shared
    with load(server, text) as asked:
        core = engine_core(server)
        named("Worker", core.children()).kill()
        psutil.wait_procs([core], timeout=300)
        until(lambda: health(server) != (200, ""))
        assert health(server) == (503, DIED)
        for path, body in [(each.path, each.body) for each in requests(text, server.model)]:
            response = server.client.post(path, json=body)
            assert (response.status_code, response.json()["error"]["message"]) == (503, DIED), path
            assert response.headers["retry-after"]
    assert_told(asked)
    assert server.stop(signal.SIGTERM) == 1
    wait_until_gone(group)
    assert not [path for path in shared if path.exists()]


@pytest.mark.matrix
def test_a_server_that_is_killed_while_it_starts(start: StartServer) -> None:
    """Also without the chunk cache."""
    server = start(*SLOW, "--no-chunk-cache", environment={"VLLM_LOGGING_LEVEL": "INFO"})
    until(lambda: "Initializing a V1 LLM engine" in server.log.read_text(), 300)  # the engine core's first words
    server.process.kill()
    server.stop()
    wait_until_gone(server.process.pid)


@pytest.mark.matrix
def test_sigterm_lets_answers_end_and_stores_what_was_computed(start: StartServer, text: Text, tmp_path: Path) -> None:
    """Including an answer that waits for chunks, and an ingestion's started chunks; new requests are refused."""
    folder = tmp_path / "kv"
    tiers = ("--chunk-cache-tiers", f"file://{folder}?size=1GiB")
    server = start(*SLOW, "--shutdown-timeout", "300", *tiers).wait_ready()
    brief = {"max_tokens": 600, "temperature": 0, "ignore_eos": True}
    rag = {"chunks": [text(200)], "question": "What?", **brief}
    chat = {"messages": [{"role": "user", "content": text(50)}], **brief}
    waiting = Asked("/v1/rag/chat", {**rag, "chunks": [text(2300) for _ in range(3)]})
    streams = [Asked("/v1/rag/chat", {**rag, "stream": True}), Asked("/v1/chat/completions", {**chat, "stream": True})]
    ingestion = Asked("/v1/rag/chunks", {"chunks": [text(2000) for _ in range(300)]})  # a minute at least
    everything = (*streams, ingestion, waiting)
    threads = [threading.Thread(target=each.run, args=(server.url,)) for each in everything]
    *early_threads, last_thread = threads
    for each, thread in zip((*streams, ingestion), early_threads, strict=True):  # the shortest is the last to begin
        thread.start()
        assert each.has_begun.wait(300)
    with frozen(engine_core(server)):  # nothing is computed before the server stops
        last_thread.start()
        until(lambda: any(chunk["tokens"] > 2200 for chunk in being_computed(server)))  # none of the ingestion's
        server.process.send_signal(signal.SIGTERM)
        until(lambda: health(server) != (200, ""))
        assert health(server) == (503, "The server is stopping.")
        assert waiting.status == 0, "it was answered too early; the test shows nothing"
    late = server.client.post("/v1/rag/chat", json=rag)
    assert (late.status_code, late.json()["error"]["message"]) == (503, "The server is stopping.")
    assert server.process.wait(300) == 0
    for thread in threads:
        thread.join()
    for each in streams:
        assert each.text.rstrip().endswith("data: [DONE]")
        assert '"finish_reason":"length"' in each.text.replace('": ', '":')
    answer = json.loads(waiting.text)
    assert (waiting.status, answer["usage"]["completion_tokens"]) == (200, 600)
    assert [chunk["status"] for chunk in answer["cache"]["chunks"]] == ["filled"] * 3
    *lines, last = map(json.loads, ingestion.text.splitlines())
    assert last["summary"]["failed"] == sum(line.get("error") == STOPPING for line in lines) > 0
    computed = [chunk["key"] for chunk in answer["cache"]["chunks"]]
    computed += [line["key"] for line in lines if line["status"] == "filled"]
    assert len(computed) > 3
    assert {path.name.split(".")[0] for path in folder.glob("??/*")} >= set(computed)
    assert "stopping before" not in server.log.read_text()


@pytest.mark.matrix
def test_what_waits_when_the_server_stops_is_told_so(start: StartServer, text: Text) -> None:
    """Files that are read or wait for their turn, ingestions that wait for theirs, and a body that still comes."""
    server = start(*SLOW).wait_ready()
    slow = b"<p>a<td>b<b>" * (1 << 19)
    split = ("/v1/rag/split?filename=a.html", {"content": slow})
    collection = ("/v1/rag/collections/slow", {"files": [("files", (name, slow)) for name in ("a.html", "b.html")]})
    ingestion = ("/v1/rag/chunks", {"json": {"chunks": [text(2000) for _ in range(50)]}})
    asked = [ingestion] * 3 + [split, collection] * 3
    with ThreadPoolExecutor(len(asked)) as threads, socket.create_connection(("127.0.0.1", server.port)) as uploading:
        uploading.sendall(b"POST /v1/rag/split?filename=a HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\na")
        answers = [threads.submit(httpx.post, f"{server.url}{path}", timeout=300, **body) for path, body in asked]
        until(lambda: being_computed(server) and num_connections(server) > len(asked) + 1)  # one is server.client's
        server.process.send_signal(signal.SIGTERM)
        uploading.settimeout(300)
        said = uploading.makefile("rb").read()
        assert server.process.wait(300) == 0
    assert said.startswith(b"HTTP/1.1 503 ")
    assert b'"reason": "stopping"' in said
    for answer in (each.result() for each in answers):
        if answer.status_code == 200:  # an ingestion whose turn has come
            assert [json.loads(line).get("error") for line in answer.text.splitlines()[:-1]] == [STOPPING] * 50
        else:
            assert (answer.status_code, answer.json()["error"]["reason"]) == (503, "stopping"), answer.url
            assert answer.headers["retry-after"]
    assert "Traceback" not in server.log.read_text()
