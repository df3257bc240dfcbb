# SPDX-License-Identifier: Apache-2.0
"""How far a run is, in words and as a bar."""

import asyncio
import io
import sys

from rich.console import Console

from benchmarks import progress
from benchmarks.progress import Monitor, shown


def at(monkeypatch, seconds):
    monkeypatch.setattr(progress.time, "monotonic", lambda: seconds)


def test_a_line_says_what_is_left(monkeypatch):
    at(monkeypatch, 100.0)
    monitor = Monitor(4)
    assert monitor.line() == "0 of 4 steps"
    monitor.workload = "context"
    at(monkeypatch, 900.0)
    monitor.step()
    assert monitor.line() == "context, 1 of 4 steps"
    at(monkeypatch, 930.0)
    monitor.step()
    assert monitor.line() == "context, 2 of 4 steps, about 0:01:00 left"


def test_a_bar_at_a_terminal():
    console = Console(file=io.StringIO(), width=80)
    monitor = Monitor(4)
    monitor.step()
    console.print(monitor)
    assert "━" in console.file.getvalue()
    assert "1 of 4 steps" in console.file.getvalue()


async def test_plain_lines_elsewhere(monkeypatch, capsys):
    monkeypatch.setattr(progress, "_INTERVAL_S", 0)
    async with shown(Monitor(4)):
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
    async with shown(Monitor(4)) as _:
        pass
    assert "0 of 4 steps" in terminal.getvalue()
