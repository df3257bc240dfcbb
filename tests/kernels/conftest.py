# SPDX-License-Identifier: Apache-2.0
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="package")
def triton_interpreted() -> Iterator[None]:
    """Set for these tests only; Triton reads it when a kernel is defined and when it runs."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TRITON_INTERPRET", "1")
        yield
