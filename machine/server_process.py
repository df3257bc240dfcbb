# SPDX-License-Identifier: Apache-2.0
"""A `tessera serve` process with a client, for demo, evaluation, benchmarks and tests."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Self

import httpx

from machine.http_client import http_client
from machine.process_watch import starter_environment

ROOT = Path(__file__).resolve().parents[1]
"""The folder of all packages: a checkout, or where the wheel is installed."""
RUN_MODULE = (sys.executable, "-P", "-m")
"""Runs a module as a program. The present folder may have another package of its name (`app`): ``-P`` leaves it out."""
START_TIMEOUT_S = 600
_HEALTH_S = 5
TESSERA_SERVE = ("app.cli", "serve")
FAILED = "tessera: failed: "
"""Begin of the line that ends a start."""


class ServerProcess:
    """One server process on the loopback interface, with a client.

    Its output goes to the file `log`. Without `port`, it gets a free port. `serve` is a module and its command, by
    default `tessera serve`. Tessera's commands end with this process, however this process ends.
    """

    def __init__(
        self,
        log: Path,
        *arguments: str,
        port: int | None = None,
        environment: dict[str, str] | None = None,
        serve: tuple[str, str] = TESSERA_SERVE,
    ) -> None:
        self._reserved = None
        if port is None:
            self._reserved = reserved_port()  # the process takes seconds to listen
            port = int(self._reserved.getsockname()[1])
        self.port = port
        self._port_is_free = is_free(self.port)  # else another server answers, and this process won't start
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        self.model = served_name(arguments) if serve == TESSERA_SERVE else arguments[0]
        """Model name for requests."""
        address = ("--host", "127.0.0.1", "--port", str(self.port))
        command = [*RUN_MODULE, *serve, *arguments, *address]
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                env={**os.environ, **starter_environment(), "PYTHONPATH": python_path(), **(environment or {})},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.client = http_client(self.url, timeout=300)

    def wait_ready(self) -> Self:
        """Waits until the server answers; stops the server on failure."""
        try:
            self._wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._is_ready():
            if self.process.poll() is not None:
                raise RuntimeError(f"server exited with {self.process.returncode}:\n{self.log.read_text()[-4000:]}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"server not ready:\n{self.log.read_text()[-4000:]}")
            time.sleep(0.2)

    def _is_ready(self) -> bool:
        try:
            return self._port_is_free and self.client.get("/health", timeout=_HEALTH_S).status_code == HTTPStatus.OK
        except httpx.TransportError:
            return False

    def stop(self, sent: int = signal.SIGTERM) -> int:
        """Sends a signal and returns the exit status; kills the process group and raises after 60 s."""
        if self.process.poll() is None:
            self.process.send_signal(sent)
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            raise
        finally:
            self.client.close()
            if self._reserved is not None:
                self._reserved.close()


def served_name(arguments: Sequence[str]) -> str:
    """The model's name under `tessera serve` with these arguments."""
    if "--served-model-name" in arguments:
        return arguments[arguments.index("--served-model-name") + 1]
    model = Path(arguments[0])
    return model.resolve().name if model.is_dir() else arguments[0]


def last_words(log: Path) -> str:
    """The reason of a failed start in a server's log, otherwise its last non-empty line."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").split("\n") if line.strip()]
    # Its processes may still write, as they end.
    reasons = [line for line in lines if line.startswith(FAILED)]
    return (reasons or lines or ["no output"])[-1]


def python_path() -> str:
    """This process's import path, in a checkout behind its root: the package need not be installed."""
    is_checkout = (ROOT / "pyproject.toml").is_file()
    return os.pathsep.join(filter(None, [str(ROOT) if is_checkout else None, os.environ.get("PYTHONPATH")]))


def is_free(port: int) -> bool:
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def group_members(process_group: int) -> list[int]:
    """Live processes of a process group."""
    members = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[2]) == process_group and fields[0] != "Z":
            members.append(int(stat.parent.name))
    return members


def reserved_port() -> socket.socket:
    """A socket that reserves a free loopback port until it is closed.

    A server with ``SO_REUSEADDR`` can still listen on the port.
    """
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return sock


def free_port() -> int:
    with reserved_port() as sock:
        return int(sock.getsockname()[1])


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Turns SIGTERM and SIGHUP into `KeyboardInterrupt`: servers in their own sessions would otherwise live on."""
    before = {number: signal.signal(number, _interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt
