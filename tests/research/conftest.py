# SPDX-License-Identifier: Apache-2.0
"""Tests of programs that are not the product: not in `make test`."""

import pytest


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.matrix)
