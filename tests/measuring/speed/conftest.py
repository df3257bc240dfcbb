# SPDX-License-Identifier: Apache-2.0
"""Small sizes of the workloads with many users."""

import pytest

from measuring.speed.workloads import placement
from measuring.speed.workloads.load import Load, Sizes
from measuring.speed.workloads.placement import Placement


@pytest.fixture
def small(monkeypatch) -> None:
    monkeypatch.setattr(Load, "short", Sizes(200, (2, 8), requests=4))
    for name, size in {"_CHUNKS": 2, "_REQUESTS_ALONE": 2, "_REQUESTS": 6}.items():
        monkeypatch.setattr(placement, name, size)
    for name, size in {"clients": 4, "output_tokens": 3}.items():
        monkeypatch.setattr(Placement, name, size)
