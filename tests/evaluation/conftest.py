# SPDX-License-Identifier: Apache-2.0
"""The server that tests ask."""

from collections.abc import Iterator

import pytest

from tests.evaluation.helpers import FakeServer, serving


@pytest.fixture(scope="session")
def running_server() -> Iterator[FakeServer]:
    with serving() as fake:
        yield fake


@pytest.fixture
def server(running_server: FakeServer) -> FakeServer:
    """A server that nobody has asked yet."""
    running_server.reset()
    return running_server
