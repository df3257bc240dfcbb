# SPDX-License-Identifier: Apache-2.0
"""How many items are worked on at once, and the end of it by an error."""

import asyncio

import pytest

from measuring.kit.workers import work_through


async def test_so_many_at_once_and_no_more():
    running, most, done = 0, 0, []
    enough = asyncio.Barrier(4)  # never passed by fewer

    async def work(item):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await enough.wait()
        running -= 1
        done.append(item)

    await work_through(iter(range(8)), work, 4)
    assert (most, sorted(done)) == (4, list(range(8)))


async def test_the_first_error_ends_the_others():
    begun, cancelled = [], []

    async def work(item):
        begun.append(item)
        if item == 1:
            raise ZeroDivisionError
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(item)
            raise

    with pytest.raises(ZeroDivisionError):
        await work_through(range(9), work, 3)
    assert set(cancelled) == set(begun) - {1}
    assert len(begun) <= 3
