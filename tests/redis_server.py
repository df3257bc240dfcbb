# SPDX-License-Identifier: Apache-2.0
"""A real Redis (or Valkey) on the loopback interface."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from machine.redis_process import NoRedisError, RedisProcess
from tests.processes import frozen


class RedisServer(RedisProcess):
    """A server with injectable faults; skips the test if none is installed."""

    def __init__(self, folder: Path) -> None:
        try:
            super().__init__(folder)
        except NoRedisError as error:
            pytest.skip(f"{error} (scripts/test_servers.sh)")

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Freezes the server during the block: it accepts connections, but never answers."""
        assert self.process is not None
        with frozen(self.process):
            yield

    @contextmanager
    def configured(self, **settings: Any) -> Iterator[None]:
        """Changes settings during the block: `maxmemory=1`."""
        before = {name: self.client.config_get(name)[name] for name in settings}
        for name, value in settings.items():
            self.client.config_set(name, value)
        try:
            yield
        finally:
            for name, value in before.items():
                self.client.config_set(name, value)
