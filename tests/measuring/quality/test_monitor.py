# SPDX-License-Identifier: Apache-2.0
"""The display during a run."""

import asyncio
import io

import pytest
from rich.console import Console

from machine import live_progress
from machine.live_progress import shown
from measuring.quality import monitor as module
from measuring.quality.monitor import Monitor
from tests.measuring.quality.helpers import make_report, make_result


@pytest.fixture
def monitor() -> Monitor:
    """One of ten answers was there before."""
    monitor = Monitor(10, "I don't know")
    monitor.add(make_result("offset"))
    monitor.start()
    return monitor


def test_at_the_start_there_is_no_rate(monitor):
    assert monitor.line() == "1/10 answers; right so far: offset 100%"
    assert Monitor(10, "x").line() == "0/10 answers"


def test_rate_and_rest_are_of_this_run(monitor, monkeypatch):
    monkeypatch.setattr(module.time, "monotonic", lambda: monitor._started + 8)
    monitor.add(make_result("full"))
    monitor.add(make_result("full", text="In Paris."))
    assert monitor.line() == "3/10 answers, 0.25/s, 0:00:28 left; right so far: full 50%, offset 100%"


def test_answers_in_another_mode_and_refused_ones_have_no_accuracy(monitor):
    monitor.add(make_result("shared", cache=make_report("full", reason="cache off")))
    monitor.add(make_result("shared", text="", cache=None, error="too long"))
    assert monitor.line().split("; ")[1:] == ["right so far: offset 100%", "1 refused by the server"]


async def test_without_a_terminal_lines_are_said_again_and_again(monitor, capsys, monkeypatch):
    monkeypatch.setattr(live_progress, "_INTERVAL_S", 0.001)
    said, say = asyncio.Event(), live_progress.say
    monkeypatch.setattr(live_progress, "say", lambda line: (say(line), "2/10" in line and said.set()))
    async with shown(monitor):
        monitor.add(make_result("full"))
        await asyncio.wait_for(said.wait(), 60)
        monitor.add(make_result("shared"))
    lines = capsys.readouterr().err.splitlines()
    assert all(line.startswith("tessera: ") for line in lines)
    assert lines[-1].startswith("tessera: 3/10 answers")


async def test_lines_end_with_an_error(monitor, capsys):
    with pytest.raises(RuntimeError):
        async with shown(monitor):
            raise RuntimeError
    assert len(asyncio.all_tasks()) == 1
    assert capsys.readouterr().err == "tessera: 1/10 answers; right so far: offset 100%\n"


async def test_a_terminal_has_a_bar_with_the_same_line(monitor, monkeypatch):
    terminal = io.StringIO()
    monkeypatch.setattr(live_progress.sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(live_progress, "Console", lambda **_: Console(file=terminal, force_terminal=True, width=120))
    async with shown(monitor):
        monitor.add(make_result("full"))
    assert "━" in terminal.getvalue()
    assert "2/10 answers" in terminal.getvalue()
