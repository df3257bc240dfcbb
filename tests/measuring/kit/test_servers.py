# SPDX-License-Identifier: Apache-2.0
"""A server for the time of a block, with the process itself replaced."""

import os
import signal

import pytest

from measuring.kit.client import SetupError
from measuring.kit.servers import started_server


def test_a_server_that_had_to_be_killed_is_no_error(process, tmp_path):
    process.stuck = True
    with started_server("m", (), tmp_path / "server.log"):
        assert process.noted == [("m",)]
    assert process.noted == [("m",), "stopped"]


@pytest.mark.parametrize(
    ("error", "says", "words"),
    [
        (
            RuntimeError,
            "INFO x\ntessera: --foo can't be used\n\n",
            "the server didn't start: --foo can't be used; its log",
        ),
        (TimeoutError, "", "the server didn't start: no output; its log is "),
        (RuntimeError, "you must provide a chat template", "chat template .start the server with --chat-template FILE"),
    ],
)
def test_why_it_did_not_start(process, tmp_path, error, says, words):
    process.says, process.fails = says, error(f"server exited with 2:\n{says}")
    with pytest.raises(SetupError, match=words), started_server("m", (), tmp_path / "server.log"):
        pytest.fail("it has not started")
    assert process.noted == [("m",), "stopped"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_signals_stop_it(process, tmp_path, number):
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), started_server("m", (), tmp_path / "server.log"):
        os.kill(os.getpid(), number)
    assert process.noted == [("m",), "stopped"]
    assert signal.getsignal(number) is before
