# SPDX-License-Identifier: Apache-2.0
"""The simulated servers of the benchmark's tests."""

from tests.measuring.conftest import fakes, model

__all__ = ["fakes", "model"]
