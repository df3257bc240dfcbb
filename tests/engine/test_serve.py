# SPDX-License-Identifier: Apache-2.0
"""`tessera serve` as a process: start, refusals, shutdown without leftovers."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.server_process import ROOT
from tests.engine.conftest import COMMON
from tests.engine.server import TesseraServer, group_members
from tests.engine.test_exactness import ask, assert_exact


def refused(*arguments: str, environment: dict[str, str] | None = None) -> str:
    """What a `tessera serve` that must not start prints; it exits with 2."""
    run = subprocess.run(
        [sys.executable, "-m", "app.cli", "serve", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 2, run.stderr
    assert "Traceback" not in run.stderr
    return [line for line in run.stderr.splitlines() if line.startswith("tessera")][-1]


@pytest.fixture
def start(model_path: Callable[[str], Path], tmp_path: Path) -> Callable[..., TesseraServer]:
    def start_server(*flags: str, **kwargs: Any) -> TesseraServer:
        arguments = [str(model_path("tiny-llama")), "--dtype", "float32", *COMMON, *flags]
        return TesseraServer(tmp_path / "server.log", *arguments, **kwargs)

    return start_server


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_every_process(sent: signal.Signals, start: Callable[..., TesseraServer]) -> None:
    server = start().wait_ready()
    assert server.chat(chunks=["a chunk"], question="?", max_tokens=1)["cache"]["mode"] == "chunked"
    group = server.process.pid
    assert len(group_members(group)) > 1
    assert server.stop(sent) == 0
    wait_until_gone(group)
    said = [line for line in server.log.read_text().splitlines() if line.startswith("tessera: ")]
    assert said[-2].startswith(f"tessera: ready at {server.url} ")
    assert said[-1] == "tessera: stopped"


def test_a_signal_during_start_ends_every_process(start: Callable[..., TesseraServer]) -> None:
    server = start()
    deadline = time.monotonic() + 60
    while "starting the engine" not in server.log.read_text() and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(3)
    assert server.stop(signal.SIGTERM) == 128 + signal.SIGTERM
    wait_until_gone(server.process.pid)


def wait_until_gone(group: int) -> None:
    deadline = time.monotonic() + 30
    while group_members(group) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not group_members(group)


def test_torch_compile_is_exact(start: Callable[..., TesseraServer], oracle: Any) -> None:
    """The default outside tests: compiled, and with settings from the environment."""
    environment = {"TESSERA_CHUNK_POSITION_STRATEGY": "offset", "TESSERA_CHUNK_CACHE_PAGE_TOKENS": "5"}
    server = start("--no-enforce-eager", environment=environment).wait_ready()
    try:
        assert server.stats()["occupancy"]["page_tokens"] == 5
        for chunks in (["first chunk" * 9, "second" * 20], ["second" * 20, "first chunk" * 9]):
            response = ask(server, "shared", chunks, "Which?")
            assert_exact(response, oracle("tiny-llama"), "shared")
        default = server.chat(chunks=["x"], question="?", max_tokens=1)["cache"]
        assert default["position_strategy"] == "offset"
    finally:
        server.stop()


def test_port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert f"port {port} is in use" in refused("some/model", "--host", "127.0.0.1", "--port", port)


@pytest.mark.parametrize(
    ("arguments", "environment", "words"),
    [
        (["m", "--api-server-count", "2"], {}, "--api-server-count=2"),
        (["m", "--data-parallel-size", "2"], {}, "--data-parallel-size=2"),
        (["m", "--headless"], {}, "--headless"),
        (["m", "--chunk-cache-memory", "much"], {}, "--chunk-cache-memory"),
        (["m", "--chunk-position-strategy", "none"], {}, "--chunk-position-strategy"),
        (["m"], {"TESSERA_CHUNK_CACHE_SIZE": "1GiB"}, "TESSERA_CHUNK_CACHE_SIZE"),
        (["/does/not/exist"], {}, "/does/not/exist"),
        (["m", "--no-such-flag"], {}, "--no-such-flag"),
    ],
)
def test_refused_in_one_line(arguments: list[str], environment: dict[str, str], words: str) -> None:
    assert words in refused(*arguments, environment=environment)
