# SPDX-License-Identifier: Apache-2.0
"""Synthetic time: what happens next happens at once."""

import heapq
import itertools
from collections.abc import Callable
from typing import Any


class Clock:
    """Seconds since the start, and what is to happen; of two events at the same time, the one planned first."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = itertools.count()

    def at(self, when: float, action: Callable[..., None], *arguments: Any) -> None:
        """Plans an event."""
        heapq.heappush(self._events, (when, next(self._order), action, arguments))

    def run(self) -> None:
        """Until nothing is planned any more."""
        while self._events:
            self.now, _, action, arguments = heapq.heappop(self._events)
            action(*arguments)
