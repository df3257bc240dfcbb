# SPDX-License-Identifier: Apache-2.0
"""A server for the time of a block, with the process itself replaced."""

import os
import signal
import subprocess

import pytest

from measuring.kit import servers as module
from measuring.kit.client import SetupError
from measuring.kit.servers import started_server
from tests.measuring.quality.helpers import TEMPLATE_ERROR


@pytest.fixture
def process(monkeypatch):
    """Stands in for ``ServerProcess``; ``fails``: its error at start, ``says``: its log."""

    class Process:
        url = "http://127.0.0.1:1"
        fails: Exception | None = None
        says = ""
        started = stopped = 0

        def __init__(self, log, *arguments, port=None):
            Process.arguments, self.log = arguments, log
            Process.started += 1
            log.write_text(Process.says)

        def wait_ready(self):
            if Process.fails:
                raise Process.fails

        def stop(self):
            Process.stopped += 1
            if Process.stuck:
                raise subprocess.TimeoutExpired("tessera", 60)

        stuck = False

    monkeypatch.setattr(module, "ServerProcess", Process)
    return Process


def test_it_runs_as_long_as_the_block(process, tmp_path):
    with started_server("m", ("--dtype", "float32"), tmp_path / "server.log") as server:
        assert (server.url, process.arguments) == (process.url, ("m", "--dtype", "float32"))
        assert process.stopped == 0
    assert (process.started, process.stopped) == (1, 1)


def test_a_server_that_had_to_be_killed_is_no_error(process, tmp_path):
    process.stuck = True
    with started_server("m", (), tmp_path / "server.log"):
        pass
    assert process.stopped == 1


@pytest.mark.parametrize(
    ("says", "words"),
    [
        ("INFO x\ntessera: --foo can't be used\n\n", "the server didn't start: --foo can't be used; its log is "),
        ("", "the server didn't start: no output; its log is "),
    ],
)
@pytest.mark.parametrize("error", [RuntimeError, TimeoutError])
def test_why_it_did_not_start(process, tmp_path, says, words, error):
    process.says, process.fails = says, error(f"server exited with 2:\n{says}")
    with pytest.raises(SetupError, match=words), started_server("m", (), tmp_path / "server.log"):
        pytest.fail("it has not started")
    assert process.stopped == 1


def test_a_missing_chat_template_comes_with_advice(process, tmp_path):
    process.says, process.fails = TEMPLATE_ERROR, RuntimeError(TEMPLATE_ERROR)
    with pytest.raises(SetupError, match="--chat-template FILE"), started_server("m", (), tmp_path / "server.log"):
        pytest.fail("it has not started")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_signals_stop_it(process, tmp_path, number):
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), started_server("m", (), tmp_path / "server.log"):
        os.kill(os.getpid(), number)
    assert process.stopped == 1
    assert signal.getsignal(number) is before
