# SPDX-License-Identifier: Apache-2.0
"""Servers with tiers."""

from pathlib import Path
from typing import Any

from tests.engine.server import TesseraServer
from tests.support.waiting import until

# A machine that runs several tests at once may be slow to read.
FILES = "file://{folder}?size=1GiB&timeout=20"
HOST = "host://?size=600KiB&timeout=20"
"""Holds segments of up to 150 tokens."""
STORING = ("--chunk-cache-tiers", f"{HOST},{FILES}")
"""Flags of a shared server, which has a folder of its own (:func:`folder_of`)."""


def folder_of(server: TesseraServer) -> Path:
    """The folder of a server with :data:`STORING`."""
    return server.log.parent / "kv"


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
