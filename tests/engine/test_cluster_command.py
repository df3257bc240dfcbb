# SPDX-License-Identifier: Apache-2.0
"""`tessera cluster`: the processes of docker/compose.yaml on this machine."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import pytest

from machine.server_process import ROOT, free_port, group_members
from tests.engine.conftest import COMMON
from tests.processes import started
from tests.redis_server import RedisServer
from tests.support.waiting import until

pytestmark = pytest.mark.matrix


def test_it_serves_starts_a_dead_replica_again_and_ends_altogether(
    model_path: Callable[[str], Path], tmp_path: Path, redis_server: RedisServer
) -> None:
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


def test_what_is_wrong_with_a_replica_is_said(tmp_path: Path, redis_server: RedisServer) -> None:
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
