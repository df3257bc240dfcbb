# SPDX-License-Identifier: Apache-2.0
"""Waiting for an event, with a limit beyond which it won't come."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import httpx


def until(condition: Callable[[], Any], seconds: float = 60, why: str = "") -> None:
    """Waits until a condition holds; fails after a timeout."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, why
        time.sleep(0.005)


def is_healthy(client: httpx.Client) -> bool:
    """Whether a server answers and is ready."""
    try:
        return client.get("/health").is_success
    except httpx.TransportError:
        return False


async def eventually(condition: Callable[[], Any], seconds: float = 15) -> None:
    """Waits until `condition()`, possibly a coroutine, is true."""
    async with asyncio.timeout(seconds):
        while True:
            value = condition()
            if await value if asyncio.iscoroutine(value) else value:
                return
            await asyncio.sleep(0.02)
