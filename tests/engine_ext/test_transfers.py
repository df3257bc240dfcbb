# SPDX-License-Identifier: Apache-2.0
"""Exchanges of the app with a worker's file server."""

import asyncio
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from cache.config import ChunkCacheConfig
from cache.manager import ChunkCacheManager
from engine_ext.chunks.transfers import PoolTransfers
from engine_ext.core.file_server import listen
from engine_ext.wire.parts import Division
from engine_ext.wire.worker_messages import Answer, ReadStored, segment_message
from tests.cache.helpers import PAGE_TOKENS, acquire, tokens


@pytest.fixture
def slow_tier(tmp_path: Path) -> Iterator[tuple[str, threading.Event]]:
    """The address of a worker whose tier has nothing for other replicas, and says so when the event is set."""
    address, answers = str(tmp_path / "0"), threading.Event()

    def answer(connection: Connection) -> None:
        if isinstance(segment_message(connection.recv_bytes()), ReadStored):
            answers.wait(10)
        connection.send_bytes(Answer(tier="host").to_bytes())

    listen(address, answer)
    yield address, answers
    answers.set()


async def test_own_loads_do_not_wait_for_what_others_read_from_a_slow_tier(slow_tier: Any) -> None:
    address, answers = slow_tier
    config = ChunkCacheConfig(12, PAGE_TOKENS, "engine")
    transfers = PoolTransfers([address], Division((0,), 1), config)
    (job, *_) = acquire(ChunkCacheManager(config), tokens(100, 4)).fills
    (entry, *_) = job.entries
    given = [asyncio.create_task(transfers.read_stored(entry, 0)) for _ in range(100)]
    await asyncio.sleep(0.05)
    async with asyncio.timeout(5):
        (loaded,) = await transfers.load(entry, ["host"])
    assert loaded.tier == "host"
    assert not any(each.done() for each in given)
    answers.set()
    await asyncio.gather(*given)
    transfers.close()
