# SPDX-License-Identifier: Apache-2.0
"""Choosing chunks within a budget."""

import pytest

from cache.sparse import Sparse, choose

SHARES = (0.1, 0.5, 0.05, 0.3, 0.05)


@pytest.mark.parametrize(
    ("budget", "mass", "kept"),
    [
        (1000, 1.0, [0, 1, 2, 3, 4]),
        (30, 1.0, [0, 1, 3]),
        (20, 1.0, [1, 3]),
        (1, 1.0, [1]),  # the best one, however long
        (1000, 0.5, [1]),
        (1000, 0.6, [1, 3]),
    ],
)
def test_the_greatest_shares_that_fit(budget: int, mass: float, kept: list[int]) -> None:
    assert choose(SHARES, [10] * 5, Sparse(budget, mass=mass)) == kept


def test_a_shorter_chunk_fits_where_a_longer_one_does_not() -> None:
    assert choose(SHARES, [10, 10, 10, 100, 5], Sparse(25)) == [0, 1, 4]


def test_equal_shares_are_taken_in_order() -> None:
    assert choose([0.25] * 4, [10] * 4, Sparse(20)) == [0, 1]


@pytest.mark.parametrize(
    ("sparse", "budget"),
    [(Sparse(), 100), (Sparse(30), 30), (Sparse(300), 100), (Sparse(None, 0.255), 25), (Sparse(30, 0.2), 20)],
)
def test_budgets_are_tokens_and_shares(sparse: Sparse, budget: int) -> None:
    assert sparse.budget(100) == budget
