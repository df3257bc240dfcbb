# SPDX-License-Identifier: Apache-2.0
"""Progress of a run: a live bar on a terminal, otherwise a line when it has changed, every few seconds at most."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

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
    told: list[str] = []
    lines = asyncio.create_task(_say_lines(monitor, told))
    try:
        yield
    finally:
        lines.cancel()
        with suppress(asyncio.CancelledError):
            await lines
        _say_if_new(monitor, told)


async def _say_lines(monitor: Monitor, told: list[str]) -> None:
    while True:
        _say_if_new(monitor, told)
        await asyncio.sleep(_INTERVAL_S)


def _say_if_new(monitor: Monitor, told: list[str]) -> None:
    if told[-1:] != [line := monitor.line()]:
        told.append(line)
        say(line)
