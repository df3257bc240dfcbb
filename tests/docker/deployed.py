# SPDX-License-Identifier: Apache-2.0
"""The services of docker/compose.yaml in containers of Podman."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from machine.server_process import ROOT

PROJECT = "tessera-test"
ROUTER, PROMETHEUS = "http://127.0.0.1:8080", "http://127.0.0.1:9090"
_SCRIPT = str(ROOT / "scripts" / "containers.sh")
_SETTINGS = set(re.findall(r"\$\{(\w+)", (ROOT / "docker" / "compose.yaml").read_text()))
"""Variables of compose.yaml. One of them, ARGS, `make test-rest ARGS=…` hands to everything that it starts."""


class Deployment:
    """The running services, by their names in compose.yaml."""

    def __init__(self, **settings: str) -> None:
        inherited = {name: value for name, value in os.environ.items() if name not in _SETTINGS}
        self._environment = {**inherited, **settings, "COMPOSE_PROJECT_NAME": PROJECT}
        self.router = httpx.Client(base_url=ROUTER, timeout=120)

    def compose(self, *command: str) -> str:
        """Output of ``scripts/containers.sh``; without a command it starts everything and asks a question."""
        ran = subprocess.run([_SCRIPT, *command], env=self._environment, stdout=subprocess.PIPE, text=True, check=False)
        assert ran.returncode == 0, ran.stdout
        return ran.stdout

    def inspect(self, service: str) -> dict[str, Any]:
        (container,) = json.loads(_podman("inspect", _of(service)))
        return container

    def state(self, service: str) -> dict[str, Any]:
        return self.inspect(service)["State"]

    def health(self, service: str) -> str:
        return self.state(service)["Health"]["Status"]

    def run(self, service: str, *command: str) -> subprocess.CompletedProcess[str]:
        """Runs a command in a service's container."""
        return subprocess.run(["podman", "exec", _of(service), *command], capture_output=True, text=True, check=False)

    def podman(self, command: str, service: str) -> None:
        _podman(command, _of(service))

    def crash(self, service: str) -> None:
        """Kills the container's first process, and all others with it. (`podman kill` counts as stopping it.)"""
        os.kill(self.state(service)["Pid"], signal.SIGKILL)

    def names(self) -> list[str]:
        """The replicas that the router knows."""
        return [replica["name"] for replica in self.router.get("/v1/cluster").json()["replicas"]]

    def ask(self, body: Mapping[str, Any], replica: str | None = None) -> dict[str, Any]:
        headers = {"x-tessera-replica": replica} if replica else {}
        answered = self.router.post("/v1/rag/chat", json=body, headers=headers)
        assert answered.status_code == 200, answered.text
        return answered.json()


@contextmanager
def checked_health() -> Iterator[None]:
    """Checks the health of all containers once a second: Podman leaves that to systemd."""
    over = threading.Event()

    def check() -> None:
        while not over.wait(1):
            for name in _podman("ps", "--format", "{{.Names}}", "--filter", f"name={PROJECT}").split():
                subprocess.run(["podman", "healthcheck", "run", name], capture_output=True, check=False)

    thread = threading.Thread(target=check)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def skip_without_podman() -> None:
    """Skips the test unless containers can be started."""
    if shutil.which("podman") is None:
        pytest.skip("Podman is not installed (docs/deployment.md)")
    if _podman("info", "--format", "{{.Host.NetworkBackend}}") != "netavark":
        pytest.skip("Podman's networks have no name server (netavark and aardvark-dns)")
    for port in (8080, 9090):
        with socket.socket() as free:
            if free.connect_ex(("127.0.0.1", port)) == 0:
                pytest.skip(f"port {port} is in use")


def _of(service: str) -> str:
    return f"{PROJECT}-{service}-1"


def _podman(*command: str) -> str:
    return subprocess.run(["podman", *command], capture_output=True, text=True, check=True).stdout.strip()
