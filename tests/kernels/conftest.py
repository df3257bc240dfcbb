# SPDX-License-Identifier: Apache-2.0
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True, scope="package")
def triton_interpreted() -> Iterator[None]:
    """Set for these tests only; Triton reads it when a kernel is defined and when it runs."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TRITON_INTERPRET", "1")
        yield


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    """As on a small machine, where float32 uses the compiled copies."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
