# SPDX-License-Identifier: Apache-2.0
"""The default position strategy of requests."""

import pytest

from cache.positions.layout import PositionStrategy
from cache.positions.strategy import strategy_for


@pytest.mark.parametrize(
    ("trained_for", "strategy"),
    [
        (("full", "shared", "offset"), PositionStrategy.SHARED),
        (("parallel", "offset"), PositionStrategy.PARALLEL),
        (("offset",), PositionStrategy.OFFSET),
    ],
)
def test_a_model_gets_what_it_was_trained_for(trained_for, strategy):
    assert strategy_for(trained_for).described() == f"{strategy} (the model was trained for it)"


@pytest.mark.parametrize("trained_for", [(), ("full",), ("window-9",)])
def test_others_get_what_loses_least_and_are_told_what_to_do(trained_for):
    found = strategy_for(trained_for)
    assert (found.strategy, found.is_known) == (PositionStrategy.OFFSET, False)
    told = found.described()
    assert told.startswith("offset (the model was not trained for chunk reuse; what reuse costs it was not measured, ")
    assert told.endswith("tessera calibrate)")
