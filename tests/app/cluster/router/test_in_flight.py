# SPDX-License-Identifier: Apache-2.0
"""The router's count of its own requests, combined with the replicas' heartbeats."""

from app.cluster.router.in_flight import InFlight
from tests.cache.helpers import Clock


def test_a_heartbeat_that_may_be_from_before_counts_nothing_twice():
    counted = InFlight(Clock())
    for _ in range(3):
        counted.add("a", 1)
    assert counted.load("a", heartbeat=5) == 3 + 2  # two of other routers
    counted.add("a", -1)
    assert counted.load("a", heartbeat=3) == 2
    assert counted.load("b", heartbeat=3) == 3


def test_a_peak_is_remembered_for_as_long_as_a_heartbeat_may_be_of_it():
    clock = Clock()
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
    counted.add("a", 1)
    clock.now += 100
    assert counted.load("a", heartbeat=1) == 1  # what is under way is a peak, too
