# SPDX-License-Identifier: Apache-2.0
"""Turns at something scarce, of which no owner gets more because it asks more often."""

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


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
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(turn)
        self._give()
        try:
            await turn
            yield
        finally:
            if turn.done() and not turn.cancelled():
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
