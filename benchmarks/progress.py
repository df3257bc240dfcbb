# SPDX-License-Identifier: Apache-2.0
"""How far a run is, and how long it has to go: a live bar at a terminal, else a plain line every few seconds."""

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import timedelta

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from app.progress import say

_INTERVAL_S = 10.0


class Monitor:
    """Counts steps, and shows those of the workload that runs."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.done = 0
        self.workload = ""
        self._first_ended = 0.0

    def step(self) -> None:
        """One more is done."""
        self.done += 1
        if self.done == 1:  # before it servers start, which tells nothing of the others
            self._first_ended = time.monotonic()

    def line(self) -> str:
        """For example ``context, 20 of 90 steps, about 0:02:28 left``."""
        parts = [self.workload, f"{self.done} of {self.total} steps"]
        if self.done > 1:
            left_s = (time.monotonic() - self._first_ended) * (self.total - self.done) / (self.done - 1)
            parts.append(f"about {timedelta(seconds=round(left_s))} left")
        return ", ".join(filter(None, parts))

    def __rich__(self) -> Table:
        grid = Table.grid(padding=(0, 1))
        grid.add_row(ProgressBar(total=self.total, completed=self.done, width=20), self.line())
        return grid


@asynccontextmanager
async def shown(monitor: Monitor) -> AsyncIterator[None]:
    """Shows the monitor on standard error while the block runs."""
    if sys.stderr.isatty():
        with Live(monitor, console=Console(stderr=True), refresh_per_second=2):
            yield
        return
    lines = asyncio.create_task(_say_lines(monitor))
    try:
        yield
    finally:
        lines.cancel()
        with suppress(asyncio.CancelledError):
            await lines


async def _say_lines(monitor: Monitor) -> None:
    while True:
        await asyncio.sleep(_INTERVAL_S)
        say(monitor.line())
