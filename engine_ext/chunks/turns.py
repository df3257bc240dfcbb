# SPDX-License-Identifier: Apache-2.0
"""Turns at something scarce, of which no owner gets more because it asks more often."""

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

Result = TypeVar("Result")


class FairTurns:
    """A number of turns: given to owners in rotation, and to those of one owner in order.

    An owner that is named has ``most_of_one`` at once; ``None`` may have all.
    """

    def __init__(self, number: int, most_of_one: int | None = None) -> None:
        self._free = number
        self._most_of_one = most_of_one or number
        self._held: Counter[str | None] = Counter()
        self._waiting: OrderedDict[str | None, deque[asyncio.Future[None]]] = OrderedDict()

    @asynccontextmanager
    async def turn(self, owner: str | None) -> AsyncIterator[None]:
        """Wait for a turn, and hold it within the context."""
        await self._taken(owner)
        try:
            yield
        finally:
            self._end(owner)

    async def run(self, owner: str | None, work: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
        """Wait for a turn, and return the result of work that holds it until it ends.

        Whoever no longer waits leaves the work, and its turn, behind: work in a thread can't be cancelled.
        """
        await self._taken(owner)
        task = asyncio.create_task(work())
        task.add_done_callback(partial(self._worked, owner))
        return await asyncio.shield(task)

    async def _taken(self, owner: str | None) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(turn)
        self._give()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._end(owner)
            raise

    def _worked(self, owner: str | None, task: asyncio.Task[Any]) -> None:
        self._end(owner)
        if not task.cancelled():
            task.exception()  # nobody may wait for it

    def _end(self, owner: str | None) -> None:
        self._free += 1
        self._held[owner] -= 1
        self._give()

    def _give(self) -> None:
        """Give free turns to those who wait."""
        while self._free and (owners := [owner for owner in self._waiting if self._may_have_one(owner)]):
            owner = owners[0]
            waiting = self._waiting.pop(owner)
            turn = waiting.popleft()
            if waiting:
                self._waiting[owner] = waiting  # behind the others
            if not turn.done():  # cancelled
                self._free -= 1
                self._held[owner] += 1
                turn.set_result(None)

    def _may_have_one(self, owner: str | None) -> bool:
        return owner is None or self._held[owner] < self._most_of_one
