# SPDX-License-Identifier: Apache-2.0
"""Progress of a run, as a bar and as lines."""

import asyncio
import io
import sys
from types import SimpleNamespace

from machine import live_progress
from machine.live_progress import shown

STEPS = SimpleNamespace(total=4, done=1, line=lambda: "1 of 4 steps")


async def test_plain_lines(monkeypatch, capsys):
    monkeypatch.setattr(live_progress, "_INTERVAL_S", 0)
    async with shown(STEPS):
        await asyncio.sleep(0.01)
    assert set(capsys.readouterr().err.splitlines()) == {"tessera: 1 of 4 steps"}
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
