# SPDX-License-Identifier: Apache-2.0
"""Works on many items, a fixed number at once."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

Item = TypeVar("Item")


async def work_through(items: Iterable[Item], work: Callable[[Item], Awaitable[None]], number: int) -> None:
    """Runs ``number`` workers, each of which takes its next item after the one before.

    The first error ends them all, and is raised.
    """
    pending = iter(items)

    async def worker() -> None:
        for item in pending:
            await work(item)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(number):
                group.create_task(worker())
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
