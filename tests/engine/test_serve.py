# SPDX-License-Identifier: Apache-2.0
"""`tessera serve` as a process: start, refusals, shutdown without leftovers."""

import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.server import claim_address
from machine.server_process import ROOT, last_words, reserved_port
from tests.engine.conftest import COMMON
from tests.engine.server import token_logprobs, wait_until_gone
from tests.support.exactness import ask, assert_exact, statuses
from tests.support.waiting import until


@pytest.mark.matrix
def test_a_worker_that_finds_no_room_for_the_required_cache_ends_the_start(start):
    server = start("--chunk-cache", "require", "--chunk-cache-memory", "1KiB")
    assert server.process.wait(300) == 2
    said = [line for line in server.log.read_text().splitlines() if line.startswith("tessera: ")]
    assert said[-1].startswith("tessera: not started (--chunk-cache require). CHUNK CACHE OFF: no chunk is reused, ")
    assert "Reason: 1024 bytes hold no page of 32 tokens" in said[-1]
    assert "e.g. --chunk-cache-memory 1GiB" in said[-1].partition("What helps: ")[2]


@pytest.mark.matrix
def test_an_interruption_ends_every_process(start):
    """SIGTERM ends each server that tests share."""
    server = start().wait_ready()
    assert server.chat(chunks=["a chunk"], question="?", max_tokens=1)["cache"]["mode"] == "chunked"
    server.end(signal.SIGINT)


@pytest.mark.matrix
def test_a_signal_during_start_ends_every_process(start):
    server = start()
    until(lambda: "starting the engine" in server.log.read_text())
    time.sleep(3)
    assert server.stop(signal.SIGTERM) == 128 + signal.SIGTERM
    wait_until_gone(server.process.pid)


@pytest.mark.matrix
def test_a_server_stopped_amid_everything_answers_as_before_when_started_again(start, oracle, text):
    """SIGTERM during an ingestion and requests ends them and all processes, and leaves nothing behind."""
    server = start("--shutdown-timeout", "5").wait_ready()
    system, chunks = text(20), [text(300), text(120)]
    before = {name: ask(server, name, chunks, "What?", system=system) for name in ("shared", "offset")}
    many = {"chunks": [text(2000) for _ in range(200)], "pin": True}
    asked = {"chunks": [text(2000), *chunks], "question": "What?", "max_tokens": 2000, "ignore_eos": True}
    ended: list[str] = []

    def send(path: str, body: dict[str, Any]) -> None:
        try:
            ended.append(str(httpx.post(f"{server.url}{path}", json=body, timeout=120).status_code))
        except httpx.HTTPError as error:
            ended.append(type(error).__name__)

    requests = [("/v1/rag/chunks", many), *[("/v1/rag/chat", {**asked, "stream": bool(i % 2)}) for i in range(6)]]
    threads = [threading.Thread(target=send, args=request) for request in requests]
    for thread in threads:
        thread.start()
    until(lambda: server.occupancy()["leases"] >= 3)
    group, port = server.process.pid, server.port
    server.process.send_signal(signal.SIGTERM)
    # Until the signal is handled; the engine has far more work than its shutdown timeout allows.
    until(lambda: httpx.post(f"{server.url}/tokenize", json={"prompt": "a"}, timeout=60).status_code != 200)
    late = [httpx.post(f"{server.url}{path}", json=body, timeout=60) for path, body in requests[:2]]
    assert [(response.status_code, response.json()["error"]["message"]) for response in late] == [
        (503, "The server is stopping.")
    ] * 2
    assert server.stop(signal.SIGTERM) == 0
    wait_until_gone(group)
    for thread in threads:
        thread.join()
    assert len(ended) == len(requests)
    assert "500" not in ended
    log = server.log.read_text()
    assert "Exception in ASGI application" not in log

    again = start(port=port).wait_ready()
    assert again.stats()["occupancy"]["segments"] == 0
    for name, answer in before.items():
        for status in ("filled", "hit"):
            response = ask(again, name, chunks, "What?", system=system, cache={"namespace": name})
            assert statuses(response) == [status] * 2
            assert token_logprobs(response) == pytest.approx(token_logprobs(answer), abs=1e-5)
    assert_exact(response, oracle("tiny-llama"), name)


@pytest.mark.matrix
def test_torch_compile_is_exact(start, oracle):
    """As by default outside tests: compiled, with settings from the environment."""
    environment = {"TESSERA_CHUNK_MODE": "offset"}
    server = start("--no-enforce-eager", environment=environment).wait_ready()
    for chunks in (["first chunk" * 9, "second" * 20], ["second" * 20, "first chunk" * 9]):
        response = ask(server, "shared", chunks, "Which?")
        assert_exact(response, oracle("tiny-llama"), "shared")
    default = server.chat(chunks=["x"], question="?", max_tokens=1)["cache"]
    assert default["position_strategy"] == "offset"


REFUSED: list[tuple[list[str], dict[str, str], str]] = [
    (["m", "--api-server-count", "2"], {}, "--api-server-count=2"),
    (["m", "--data-parallel-size", "2"], {}, "--data-parallel-size=2"),
    (["m", "--headless"], {}, "--headless"),
    (["m", "--chunk-cache-memory", "much"], {}, "--chunk-cache-memory"),
    (["m", "--chunk-mode", "none"], {}, "--chunk-mode"),
    (["m"], {"TESSERA_CHUNK_CACHE_SIZE": "1GiB"}, "TESSERA_CHUNK_CACHE_SIZE"),
    (["/does/not/exist"], {}, "/does/not/exist"),
    (["m", "--no-such-flag"], {}, "--no-such-flag"),
    (["m", "--host", "0.0.0.0"], {}, "--host 0.0.0.0 would let in everybody who reaches this machine"),
    (["m", "--tenants", "/does/not/exist"], {}, "--tenants /does/not/exist: [Errno 2] No such file or directory"),
    (["m", "--port", "{listening}"], {}, "port {listening} is in use"),
    # It does not listen yet, so the system would assign its port to another.
    (["m", "--port", "{starting}"], {}, "port {starting} is in use"),
    # Said before the model is loaded.
    (
        ["{model}", "--dtype", "float32", *COMMON, "--chunk-cache", "require", "--decode-context-parallel-size", "2"],
        {},
        "not started (--chunk-cache require). CHUNK CACHE OFF: no chunk is reused, every request is computed in full, "
        "as slowly as without Tessera. Reason: context parallelism spreads a sequence's KV",
    ),
]
"""Arguments, environment, and what is said; with the ports of a server that listens and of one that starts."""
_ONE_AFTER_THE_OTHER = """
import json, os, sys
from app.cli import main

for arguments, environment, _ in json.loads(sys.argv[1]):
    os.environ.update(environment)
    try:
        status = main(["serve", *arguments])
    except SystemExit as end:
        status = end.code
    print(f"= {status}", file=sys.stderr, flush=True)
    for name in environment:
        del os.environ[name]
"""


@pytest.fixture(scope="module")
def said(model_path: Callable[[str], Path]) -> list[tuple[int, str, str]]:
    """Exit status, output and expected words of each refused command.

    In one process, since importing vLLM is slow.
    """
    with socket.create_server(("127.0.0.1", 0)) as listening, reserved_port() as starting:
        ports = {"listening": listening.getsockname()[1], "starting": starting.getsockname()[1]}
        names = {**ports, "model": model_path("tiny-llama")}
        asked = [([each.format(**names) for each in flags], given, words) for flags, given, words in REFUSED]
        with claim_address(f"http://127.0.0.1:{ports['starting']}"):
            run = subprocess.run(
                [sys.executable, "-c", _ONE_AFTER_THE_OTHER, json.dumps(asked)],
                cwd=ROOT,
                capture_output=True,
                text=True,
                timeout=300,
            )
    parts = re.split(r"^= (\d+)$", run.stderr, flags=re.MULTILINE)
    assert len(parts) == 2 * len(REFUSED) + 1, run.stderr
    ends = zip(parts[::2], parts[1::2], REFUSED, strict=False)
    return [(int(status), output, words.format(**names)) for output, status, (*_, words) in ends]


@pytest.mark.parametrize("number", range(len(REFUSED)), ids=[words for *_, words in REFUSED])
def test_refused_in_one_line(number, said):
    status, output, words = said[number]
    assert status == 2
    assert "Traceback" not in output
    assert words in [line for line in output.splitlines() if line.startswith("tessera")][-1]


# Where a server's start is told: our stages at the terminal, vLLM's details in a file


_DETAILS = re.compile(r"^\((?:MainProcess|EngineCore|VllmWorker-\d) pid=\d+\) INFO ", re.M)
_STAGES = ("starting the engine with .+", "loading the weights", "compiling and warming up", "self-check")


def file_named_in(said: str) -> Path:
    (path,) = re.findall(r"^tessera: vLLM's log is in (\S+);", said, re.M)
    return Path(path)


def test_stages_with_their_times_are_told_and_details_are_in_a_file(server):
    said = server.log.read_text()
    assert not _DETAILS.search(said)
    times = re.findall(rf"^tessera: ({'|'.join(_STAGES)}): \d+\.\d s$", said, re.M)
    assert [re.fullmatch(stage, time) is not None for stage, time in zip(_STAGES, times, strict=True)] == [True] * 4
    assert f"tessera: ready at {server.url} after " in said
    log = file_named_in(said).read_text()
    for process in ("MainProcess", "EngineCore", "VllmWorker-0"):
        assert re.search(rf"^\({process} pid=\d+\) INFO ", log, re.M)
    warnings = {line for line in log.splitlines() if re.match(r"\(\S+ pid=\d+\) (WARNING|ERROR) ", line)}
    assert warnings
    assert warnings <= set(said.splitlines())


@pytest.mark.matrix
@pytest.mark.serve_with("--documents", "auto", "--log-level", "info")
def test_the_level_info_brings_details_back(server):
    said = server.log.read_text()
    assert re.search(r"\(EngineCore pid=\d+\) INFO ", said)
    assert "vLLM's log is in" not in said
    assert re.search(r"^tessera: self-check: \d+\.\d s$", said, re.M)


@pytest.mark.matrix
def test_a_failed_start_says_why_and_where_the_log_is(start):
    server = start("--kv-cache-memory-bytes", "1K")
    assert server.process.wait(300) == 1
    said = server.log.read_text()
    last = last_words(server.log)
    assert last.startswith("tessera: failed: ValueError: ")
    assert last.endswith(f"; vLLM's log is in {file_named_in(said)}")
    assert re.search(r"^\(EngineCore pid=\d+\) ERROR ", said, re.M)
