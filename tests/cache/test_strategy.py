# SPDX-License-Identifier: Apache-2.0
"""The default position strategy of requests."""

import pytest

from cache.positions.layout import PositionStrategy
from cache.positions.strategy import UNKNOWN, DefaultStrategy, strategy_for


@pytest.mark.parametrize(
    ("trained_for", "strategy"),
    [
        (("full", "shared", "offset"), PositionStrategy.SHARED),
        (("parallel", "offset"), PositionStrategy.PARALLEL),
        (("offset",), PositionStrategy.OFFSET),
    ],
)
def test_a_model_gets_what_it_was_trained_for(trained_for, strategy):
    assert strategy_for(trained_for) == DefaultStrategy(strategy, "the model was trained for it")


@pytest.mark.parametrize("trained_for", [(), ("full",), ("window-9",)])
def test_others_get_what_loses_least(trained_for):
    assert strategy_for(trained_for) == UNKNOWN
    assert UNKNOWN.strategy is PositionStrategy.OFFSET
    assert not UNKNOWN.is_known


def test_it_says_why_and_what_to_do():
    known = DefaultStrategy(PositionStrategy.SHARED, "--chunk-position-strategy")
    assert known.described() == "shared (--chunk-position-strategy)"
    untrained = "offset (the model was not trained for chunk reuse; what reuse costs it was not measured, "
    assert UNKNOWN.described().startswith(untrained)
    assert UNKNOWN.described().endswith("tessera calibrate)")
