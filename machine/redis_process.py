# SPDX-License-Identifier: Apache-2.0
"""A private Redis or Valkey on the loopback interface, for local clusters, benchmarks and tests."""

import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from redis import Redis
from redis.exceptions import RedisError

from machine.server_process import free_port

_START_TIMEOUT_S = 30


class NoRedisError(Exception):
    """Redis is not installed or does not start; the message states the reason."""


class RedisProcess:
    """One server, empty at each start, without files; keeps its port across restarts."""

    def __init__(self, folder: Path) -> None:
        binary = shutil.which("redis-server") or shutil.which("valkey-server")
        if binary is None:
            raise NoRedisError(
                "neither redis-server nor valkey-server is installed (on Debian: apt install redis-server)"
            )
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.client = Redis(port=self.port, socket_timeout=10)
        flags = {"port": self.port, "bind": "127.0.0.1", "save": "", "appendonly": "no", "dir": folder}
        self._command = [binary, *(part for name, value in flags.items() for part in (f"--{name}", str(value)))]
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Starts the server and waits until it answers."""
        self.process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, start_new_session=True)
        try:
            self._wait_ready(self.process)
        except BaseException:
            self.stop()
            raise

    def _wait_ready(self, process: "subprocess.Popen[bytes]") -> None:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while True:
            try:
                self.client.ping()
                return
            except RedisError as error:
                if time.monotonic() > deadline or process.poll() is not None:
                    raise NoRedisError(f"{self._command[0]} does not answer: {error}") from error
                time.sleep(0.02)

    def stop(self) -> None:
        """Kills the server, as a crash would."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


@contextmanager
def local_redis() -> Iterator[str]:
    """Yields the URL of a server that lives as long as the block; raises :class:`NoRedisError`."""
    with tempfile.TemporaryDirectory(prefix="tessera-redis-") as folder:
        server = RedisProcess(Path(folder))
        try:
            yield server.url
        finally:
            server.stop()
