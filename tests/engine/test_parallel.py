# SPDX-License-Identifier: Apache-2.0
"""An engine of two workers, each with the KV of its heads (tensor parallel) or layers (pipeline parallel)."""

from typing import Any

import pytest

from tests.cores import all_cores
from tests.engine.server import TesseraServer
from tests.support.exactness import assert_filled_hit_and_mixed_are_exact
from tests.support.parallel import (
    ENVIRONMENT,
    WORKERS,
    Text,
    assert_lost_pages_are_refused,
    assert_many_requests_at_once_are_exact,
)

pytestmark = pytest.mark.matrix


@pytest.fixture(params=["tensor parallel", "pipeline parallel"])
def server(request: pytest.FixtureRequest, serve: Any) -> TesseraServer:
    with all_cores():
        return serve("tiny-llama", *WORKERS[request.param], environment=ENVIRONMENT)


def test_filled_hit_and_mixed(server: TesseraServer, oracle: Any, text: Text) -> None:
    occupancy = server.stats()["occupancy"]
    assert_filled_hit_and_mixed_are_exact(server, oracle("tiny-llama"), text)
    # 4 layers x 2 KV heads x 64 x (K and V) x 4 bytes = 4096 bytes a token, half of them in each worker's 256 MiB.
    assert occupancy["pages_total"] * occupancy["page_tokens"] * 4096 == 2 * 256 << 20


def test_many_requests_at_once(server: TesseraServer, oracle: Any, text: Text) -> None:
    """A pipeline has several steps in flight."""
    assert_many_requests_at_once_are_exact(server, oracle("tiny-llama"), text)


def test_workers_that_lost_their_pages_refuse_to_load_them(server: TesseraServer, oracle: Any, text: Text) -> None:
    assert_lost_pages_are_refused(server, oracle("tiny-llama"), text)
