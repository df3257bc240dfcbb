# SPDX-License-Identifier: Apache-2.0
"""How far a run is, in words."""

from measuring.speed import progress
from measuring.speed.progress import Monitor


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
