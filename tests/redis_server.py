# SPDX-License-Identifier: Apache-2.0
"""A real Redis (or Valkey) on the loopback interface."""

import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import RedisError

from app.server_process import free_port


class RedisServer:
    """One server, empty at the start. `stop` and `start` keep its port, and nothing else."""

    def __init__(self, folder: Path) -> None:
        self._binary = shutil.which("redis-server") or shutil.which("valkey-server")
        if self._binary is None:
            pytest.skip("neither redis-server nor valkey-server is installed (scripts/test_servers.sh)")
        self._folder = folder
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.client = Redis(port=self.port, socket_timeout=10)
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        assert self._binary is not None
        flags = {"port": self.port, "bind": "127.0.0.1", "save": "", "appendonly": "no", "dir": self._folder}
        command = [self._binary, *(part for name, value in flags.items() for part in (f"--{name}", str(value)))]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + 30
        while True:
            try:
                self.client.ping()
                return
            except RedisError:
                if time.monotonic() > deadline or self._process.poll() is not None:
                    raise
                time.sleep(0.02)

    def stop(self) -> None:
        """As a crash would: at once."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """It accepts connections meanwhile, and answers nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    @contextmanager
    def configured(self, **settings: Any) -> Iterator[None]:
        """With other settings meanwhile: `maxmemory=1`."""
        before = {name: self.client.config_get(name)[name] for name in settings}
        for name, value in settings.items():
            self.client.config_set(name, value)
        try:
            yield
        finally:
            for name, value in before.items():
                self.client.config_set(name, value)
