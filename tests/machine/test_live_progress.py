# SPDX-License-Identifier: Apache-2.0
"""Progress of a run, as a bar and as lines."""

import asyncio
import io
import sys
from types import SimpleNamespace

from machine import live_progress
from machine.live_progress import shown

STEPS = SimpleNamespace(total=4, done=1, line=lambda: "1 of 4 steps")


async def test_plain_lines_tell_what_is_new(monkeypatch, capsys):
    monkeypatch.setattr(live_progress, "_INTERVAL_S", 0)
    steps = SimpleNamespace(total=4, done=1)
    steps.line = lambda: f"{steps.done} of 4 steps"
    async with shown(steps):
        await asyncio.sleep(0.01)
        steps.done = 2
        await asyncio.sleep(0.01)
        steps.done = 3
    assert capsys.readouterr().err.splitlines() == [f"tessera: {done} of 4 steps" for done in (1, 2, 3)]
    await asyncio.sleep(0.01)
    assert capsys.readouterr().err == ""


async def test_a_live_bar_at_a_terminal(monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    async with shown(STEPS):
        pass
    assert "━" in terminal.getvalue()
    assert "1 of 4 steps" in terminal.getvalue()
