# SPDX-License-Identifier: Apache-2.0
"""Messages for the user at the terminal."""

import asyncio
import io
import re
import sys
import threading
from types import SimpleNamespace

import pytest

from machine import live_progress, progress
from machine.live_progress import shown


def test_progress_speaks_while_it_lasts(capsys, monkeypatch):
    monkeypatch.setattr(progress, "_INTERVAL_S", 0.001)
    said = threading.Event()
    say = progress.say
    monkeypatch.setattr(progress, "say", lambda message: (say(message), message.endswith(" s") and said.set()))
    with progress.progress("starting"):
        assert said.wait(30)
    with pytest.raises(RuntimeError), progress.progress("failing"):
        raise RuntimeError
    out, err = capsys.readouterr()
    first, second, *_ = err.splitlines()
    assert (out, first) == ("", "tessera: starting …")
    assert second.startswith("tessera: starting … ")
    assert "progress" not in [thread.name for thread in threading.enumerate()]


def test_stages_follow_one_another_and_no_character_steers_the_terminal(capsys):
    with progress.progress("loading") as shown:
        shown.begin("checking")
    lines = re.sub(r"\d+\.\d s", "T", capsys.readouterr().err).splitlines()
    assert lines == [f"tessera: {stage}{end}" for stage in ("loading", "checking") for end in (" …", ": T")]
    progress.say("a\x1b[2J\r\udc80b\nc")
    assert capsys.readouterr().err == "tessera: a\\x1b[2J\\r\\x80b\nc\n"


def test_a_terminal_has_one_live_line_that_others_lines_replace(monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "12")
    with progress.progress("loading the weights"):
        progress.show("WARNING: x")
    clear = "\x1b[2K"
    assert terminal.getvalue().startswith(
        f"{clear}tessera: lo\r{clear}WARNING: x\n{clear}tessera: loading the weights: "
    )
    assert terminal.getvalue().endswith(" s\n")


# Progress of a run, as a bar and as lines


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
