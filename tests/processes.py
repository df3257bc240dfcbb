# SPDX-License-Identifier: Apache-2.0
"""Processes that end with the test that started them."""

import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import psutil

_END_S = 60


@contextmanager
def started(command: Sequence[str], **options: Any) -> Iterator["subprocess.Popen[Any]"]:
    """A process in a session of its own; at the end of the block it is terminated, then its process group killed."""
    with subprocess.Popen(command, start_new_session=True, **options) as process:
        try:
            yield process
        finally:
            end(process)


def end(process: "subprocess.Popen[Any]") -> None:
    """Terminates a process, and kills what is left of its group."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
    kill_group(process.pid)


@contextmanager
def frozen(process: "subprocess.Popen[Any] | psutil.Process") -> Iterator[None]:
    """Stops a process for the block: its sockets accept connections, but it never answers."""
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


def kill_group(group: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def let_children_be_interrupted() -> None:
    """Children get the default of SIGINT and SIGHUP, also if this process ignores them (`nohup make test &`)."""
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, _do_nothing)  # unlike SIG_IGN, children do not inherit it


def _do_nothing(*_: object) -> None:
    """Handles a signal."""
