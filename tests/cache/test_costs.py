# SPDX-License-Identifier: Apache-2.0
"""Estimates of the time for computing and fetching."""

import pytest

from cache.costs import RELEVANT_S, Costs, Pace
from cache.segments.holdings import Tier
from tests.cache.helpers import Clock


def test_nothing_is_known_before_the_first_measurement_or_long_after_the_last():
    clock = Clock()
    pace = Pace(clock)
    assert pace.seconds(10) is None
    pace.observe(100, 2)
    assert pace.seconds(10) == pytest.approx(0.2)
    clock.now += RELEVANT_S - 1
    assert pace.seconds(10) == pytest.approx(0.2)
    clock.now += 1
    assert pace.seconds(10) is None
    pace.observe(100, 8)
    assert pace.seconds(10) == pytest.approx(0.8)  # nothing of the old measurements


def test_what_was_given_up_counts_at_once_and_never_makes_a_pace_quicker():
    pace = Pace(Clock())
    pace.observe(100, 1)
    pace.given_up(100, 5)
    assert pace.seconds(100) == pytest.approx(10)
    pace.given_up(100, 1)
    assert pace.seconds(100) == pytest.approx(10)


def test_one_slow_measurement_among_others_changes_little():
    pace = Pace(Clock())
    for _ in range(10):
        pace.observe(100, 1)
    pace.observe(100, 2)
    assert pace.seconds(100) == pytest.approx(1.2)
    for _ in range(30):
        pace.observe(100, 2)
    assert pace.seconds(100) == pytest.approx(2, rel=0.01)


def test_what_is_unknown_is_tried():
    costs = Costs()
    assert costs.is_worth_fetching(Tier.HOST, 100, 1000)
    costs.computing.observe(100, 1)
    assert costs.is_worth_fetching(Tier.HOST, 100, 1000)
    costs.fetching[Tier.HOST].observe(1000, 2)
    assert not costs.is_worth_fetching(Tier.HOST, 100, 1000)
    assert costs.is_worth_fetching(Tier.HOST, 100, 400)
    assert costs.is_worth_fetching(Tier.DISK, 100, 1000)  # another tier has another pace
