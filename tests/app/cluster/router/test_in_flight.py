# SPDX-License-Identifier: Apache-2.0
"""The router's count of its own requests, combined with the replicas' heartbeats."""

import pytest

from app.cluster.router.in_flight import InFlight


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_a_heartbeat_that_may_be_from_before_counts_nothing_twice(clock):
    counted = InFlight(clock)
    for _ in range(3):
        counted.add("a", 1)
    assert counted.load("a", heartbeat=5) == 3 + 2  # two of other routers
    counted.add("a", -1)
    assert counted.load("a", heartbeat=3) == 2
    assert counted.load("b", heartbeat=3) == 3


def test_a_peak_is_remembered_for_as_long_as_a_heartbeat_may_be_of_it(clock):
    counted = InFlight(clock)
    for change in (1, 1, -1, -1):
        counted.add("a", change)
    for passed in (0, 1, 1):
        clock.now += passed
        assert (counted["a"], counted.load("a", heartbeat=2)) == (0, 0)
    clock.now += 3
    counted.load("a", heartbeat=0)
    clock.now += 3
    assert counted.load("a", heartbeat=2) == 2


def test_what_is_under_way_is_a_peak_too(clock):
    counted = InFlight(clock)
    counted.add("a", 1)
    clock.now += 100
    assert counted.load("a", heartbeat=1) == 1
