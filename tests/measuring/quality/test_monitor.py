# SPDX-License-Identifier: Apache-2.0
"""The line that tells how a run goes."""

from measuring.quality import monitor as module
from measuring.quality.monitor import Monitor
from tests.measuring.fake_server import make_report
from tests.measuring.quality.helpers import make_result


def test_the_line(monkeypatch):
    """One of ten answers was there before; rate and rest are of this run."""
    monitor = Monitor(10, "I don't know")
    assert monitor.line() == "0/10 answers"
    monitor.add(make_result("offset"))
    monitor.start()
    assert monitor.line() == "1/10 answers; right so far: offset 100%"
    monkeypatch.setattr(module.time, "monotonic", lambda: monitor._started + 8)
    monitor.add(make_result("full"))
    monitor.add(make_result("full", text="In Paris."))
    assert monitor.line() == "3/10 answers, 0.25/s, 0:00:28 left; right so far: full 50%, offset 100%"
    # Answers in another mode and refused requests have no accuracy.
    monitor.add(make_result("shared", cache=make_report("full", reason="cache off")))
    monitor.add(make_result("shared", text="", cache=None, error="too long"))
    assert monitor.line().split("; ")[1:] == ["right so far: full 50%, offset 100%", "1 refused by the server"]
