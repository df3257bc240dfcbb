# SPDX-License-Identifier: Apache-2.0
"""The server that tests ask."""

from collections.abc import Iterator

import pytest

from tests.measuring.quality.helpers import FakeServer, serving


@pytest.fixture
def server() -> Iterator[FakeServer]:
    """One of the test's own: what an ended run has sent may arrive late."""
    with serving() as fake:
        yield fake
