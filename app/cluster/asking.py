# SPDX-License-Identifier: Apache-2.0
"""Long requests to replicas that may die meanwhile."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import httpx


async def answered_while(
    is_alive: Callable[[], Awaitable[bool]], request: Coroutine[Any, Any, httpx.Response], every_s: float
) -> httpx.Response | None:
    """The response, however long it takes; ``None`` once its replica is no longer alive.

    ``is_alive`` is asked every ``every_s`` seconds.
    """
    asking = asyncio.create_task(request)
    try:
        while not (await asyncio.wait({asking}, timeout=every_s))[0]:
            if not await is_alive():
                return None
        return asking.result()
    finally:
        asking.cancel()
