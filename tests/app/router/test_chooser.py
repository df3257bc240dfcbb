# SPDX-License-Identifier: Apache-2.0
"""What a router counts of its own requests."""

import pytest

from app.router import chooser
from app.router.chooser import InFlight


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 100.0

        def monotonic(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(chooser, "time", clock)
    return clock


def test_a_peak_is_remembered_for_as_long_as_a_heartbeat_may_be_of_it(clock):
    counted = InFlight()
    for change in (1, 1, -1, -1):
        counted.add("a", change)
    for passed in (0, 1, 1):
        clock.now += passed
        assert (counted["a"], counted.recent_peak("a"), counted.recent_peak("b")) == (0, 2, 0)
    clock.now += 3
    counted.recent_peak("a")
    clock.now += 3
    assert counted.recent_peak("a") == 0


def test_what_is_under_way_is_a_peak_too(clock):
    counted = InFlight()
    counted.add("a", 1)
    clock.now += 100
    assert counted.recent_peak("a") == 1
