# SPDX-License-Identifier: Apache-2.0
"""The distance of predictions, of which only the likeliest tokens are known."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from measuring.quality.divergence import kl_divergence


def distribution(masses: list[float]) -> dict[int, float]:
    return {token: math.log(mass / sum(masses)) for token, mass in enumerate(masses)}


def textbook(full: dict[int, float], cached: dict[int, float]) -> float:
    return sum(math.exp(full[t]) * (full[t] - cached[t]) for t in full)


@given(pairs=st.lists(st.tuples(st.floats(0.001, 1), st.floats(0.001, 1)), min_size=2, max_size=8))
def test_it_is_the_textbooks_where_the_whole_vocabulary_is_known(pairs):
    full, cached = map(distribution, map(list, zip(*pairs, strict=True)))
    assert kl_divergence(full, cached) == pytest.approx(textbook(full, cached), abs=1e-5)


@given(pairs=st.lists(st.tuples(st.floats(0.001, 1), st.floats(0.001, 1)), min_size=2, max_size=8), data=st.data())
def test_what_is_not_known_only_makes_it_smaller(pairs, data):
    full, cached = map(distribution, map(list, zip(*pairs, strict=True)))
    parts = [data.draw(st.sets(st.sampled_from(sorted(full)))) for _ in range(2)]
    known = [{token: side[token] for token in part} for side, part in zip((full, cached), parts, strict=True)]
    assert 0 <= kl_divergence(*known) <= textbook(full, cached) + 1e-5


def test_alike_distributions_and_impossible_tokens():
    assert kl_divergence(distribution([1, 2, 3]), distribution([1, 2, 3])) == 0
    assert kl_divergence({}, {}) == 0
    sure, never = {7: 0.0}, {7: -math.inf, 8: 0.0}
    assert kl_divergence(sure, never) == pytest.approx(20)
    assert kl_divergence(never, sure) == pytest.approx(20)
