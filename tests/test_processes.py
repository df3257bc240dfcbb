# SPDX-License-Identifier: Apache-2.0
"""Processes that tests start can be interrupted, and end with them."""

import signal
import subprocess
import sys

import pytest

from machine.server_process import group_members
from tests.processes import let_children_be_interrupted, started
from tests.support.waiting import until

STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("ready", flush=True)
time.sleep(600)
"""
INTERRUPTED = "import os, signal; os.kill(os.getpid(), signal.SIGINT)"


def test_a_process_and_its_children_end_with_the_test_also_if_it_fails(monkeypatch):
    monkeypatch.setattr("tests.processes._END_S", 0.1)
    processes = []

    def fail():
        with started([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE) as process:
            process.stdout.readline()
            processes.append(process)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert processes[0].returncode == -signal.SIGKILL
    until(lambda: not group_members(processes[0].pid))


def test_children_of_tests_in_the_background_can_be_interrupted():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        let_children_be_interrupted()
        ended = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True)
    finally:
        signal.signal(signal.SIGINT, before)
    assert "KeyboardInterrupt" in ended.stderr
