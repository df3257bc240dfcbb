# SPDX-License-Identifier: Apache-2.0
"""Choosing chunks within a budget."""

import pytest

from cache.sparse import Sparse, choose

SHARES = (0.1, 0.5, 0.05, 0.3, 0.05)


def test_the_greatest_shares_that_fit() -> None:
    for budget, mass, kept in (
        *((1000, 1.0, [0, 1, 2, 3, 4]), (30, 1.0, [0, 1, 3]), (20, 1.0, [1, 3])),
        (1, 1.0, [1]),  # the best one, however long
        *((1000, 0.5, [1]), (1000, 0.6, [1, 3])),
    ):
        assert choose(SHARES, [10] * 5, Sparse(budget, mass=mass)) == kept
    assert choose(SHARES, [10, 10, 10, 100, 5], Sparse(25)) == [0, 1, 4]  # a shorter one fits
    assert choose([0.25] * 4, [10] * 4, Sparse(20)) == [0, 1]  # equal ones in order


@pytest.mark.parametrize(
    ("sparse", "budget"),
    [(Sparse(), 100), (Sparse(30), 30), (Sparse(300), 100), (Sparse(None, 0.255), 25), (Sparse(30, 0.2), 20)],
)
def test_budgets_are_tokens_and_shares(sparse: Sparse, budget: int) -> None:
    assert sparse.budget(100) == budget
