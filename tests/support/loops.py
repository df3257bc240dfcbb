# SPDX-License-Identifier: Apache-2.0
"""A watch over the event loop."""

import asyncio
import time
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def longest_pause(work: Awaitable[T]) -> tuple[float, T]:
    """The loop's longest pause during `work`, as a share of its time, and its result."""
    paused = 0.0

    async def watch() -> None:
        nonlocal paused
        while True:
            before = time.perf_counter()
            await asyncio.sleep(0.001)
            paused = max(paused, time.perf_counter() - before)

    watching = asyncio.create_task(watch())
    await asyncio.sleep(0.01)
    started = time.perf_counter()
    result = await work
    took = time.perf_counter() - started
    await asyncio.sleep(0.002)
    watching.cancel()
    return paused / took, result
