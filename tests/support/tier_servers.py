# SPDX-License-Identifier: Apache-2.0
"""Servers with tiers."""

import itertools
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.engine.conftest import ALWAYS_FETCHING, COMMON
from tests.engine.server import TesseraServer
from tests.support.waiting import until


class Directory:
    """A directory, with servers of one model that use it as their tier."""

    def __init__(self, stack: ExitStack, folder: Path, model: Path) -> None:
        """`stack` ends every server."""
        self._stack = stack
        self.path = folder / "kv"
        # A machine that runs several tests at once may be slow to read.
        self.tiers = f"file://{self.path}?size=1GiB&timeout=20"
        self._folder, self._model = folder, str(model)
        self._numbers = itertools.count()
        self.server = self.start(self.tiers)

    def start(self, tiers: str, *flags: str, wait: bool = True, **kwargs: Any) -> TesseraServer:
        log = self._folder / f"server-{next(self._numbers)}.log"
        kwargs.setdefault("serve", ALWAYS_FETCHING)
        model = (self._model, "--dtype", "float32")
        server = TesseraServer(log, *model, *COMMON, "--chunk-cache-tiers", tiers, *flags, **kwargs)
        self._stack.callback(server.stop)
        return server.wait_ready() if wait else server


def archived(server: TesseraServer) -> dict[str, Any]:
    """Waits until everything is stored; returns the stats."""
    until(lambda: not server.occupancy()["archive_waiting"])
    return server.stats()


def to_sleep(server: TesseraServer) -> None:
    """Drops all stored segments from the pool."""
    archived(server)
    slept = server.post("/v1/cache/sleep", {"idle_s": 0})
    assert slept["segments"] > 0
    assert server.stats()["occupancy"]["segments"] == 0


def origins(response: dict[str, Any]) -> list[str | None]:
    return [chunk.get("origin") or chunk["status"] for chunk in response["cache"]["chunks"]]
