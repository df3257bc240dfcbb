# SPDX-License-Identifier: Apache-2.0
"""Progress of a run, as a bar and as lines."""

import asyncio
import io
import sys

from rich.console import Console

from machine import live_progress
from machine.live_progress import Bar, shown


class Steps:
    def __init__(self, total):
        self.total = total
        self.done = 0

    def line(self):
        return f"{self.done} of {self.total} steps"


def test_a_bar_at_a_terminal():
    console = Console(file=io.StringIO(), width=80)
    monitor = Steps(4)
    monitor.done += 1
    console.print(Bar(monitor))
    assert "━" in console.file.getvalue()
    assert "1 of 4 steps" in console.file.getvalue()


async def test_plain_lines_elsewhere(monkeypatch, capsys):
    monkeypatch.setattr(live_progress, "_INTERVAL_S", 0)
    async with shown(Steps(4)):
        await asyncio.sleep(0.01)
    lines = capsys.readouterr().err.splitlines()
    assert set(lines) == {"tessera: 0 of 4 steps"}
    await asyncio.sleep(0.01)
    assert capsys.readouterr().err == ""


async def test_a_live_bar_at_a_terminal(monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    async with shown(Steps(4)) as _:
        pass
    assert "0 of 4 steps" in terminal.getvalue()
