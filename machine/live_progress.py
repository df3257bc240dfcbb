# SPDX-License-Identifier: Apache-2.0
"""Progress of a run: a live bar on a terminal, otherwise a line when it has changed, every few seconds at most."""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from machine.beside import beside
from machine.progress import say

_INTERVAL_S = 5.0


class Monitor(Protocol):
    """Counts a run's steps and describes its state in one line."""

    total: int
    done: int

    def line(self) -> str: ...


class Bar:
    """Renders a monitor with rich."""

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor

    def __rich__(self) -> Table:
        grid = Table.grid(padding=(0, 1))
        bar = ProgressBar(total=self._monitor.total, completed=self._monitor.done, width=20)
        grid.add_row(bar, self._monitor.line())
        return grid


@asynccontextmanager
async def shown(monitor: Monitor) -> AsyncIterator[None]:
    """Shows the monitor on standard error while the block runs."""
    if sys.stderr.isatty():
        with Live(Bar(monitor), console=Console(stderr=True), refresh_per_second=2):
            yield
        return
    told = ""

    def tell_news() -> None:
        nonlocal told
        if (line := monitor.line()) != told:
            told = line
            say(line)

    try:
        async with beside(_repeat(tell_news)):
            yield
    finally:
        tell_news()


async def _repeat(tell: Callable[[], None]) -> None:
    while True:
        tell()
        await asyncio.sleep(_INTERVAL_S)
