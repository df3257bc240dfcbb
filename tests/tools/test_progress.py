# SPDX-License-Identifier: Apache-2.0
"""Messages for the user at the terminal."""

import threading

import pytest

from tools import progress


def test_words_go_to_standard_error(capsys):
    progress.say("hello")
    assert capsys.readouterr() == ("", "tessera: hello\n")


def test_progress_speaks_while_it_lasts(capsys, monkeypatch):
    monkeypatch.setattr(progress, "_INTERVAL_S", 0.001)
    said = threading.Event()
    say = progress.say
    monkeypatch.setattr(progress, "say", lambda message: (say(message), message.endswith(" s") and said.set()))
    with progress.progress("starting"):
        assert said.wait(30)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "tessera: starting …"
    assert lines[1].startswith("tessera: starting … ")
    assert "progress" not in [thread.name for thread in threading.enumerate()]


def test_progress_ends_with_an_error():
    with pytest.raises(RuntimeError), progress.progress("starting"):
        raise RuntimeError
    assert "progress" not in [thread.name for thread in threading.enumerate()]
