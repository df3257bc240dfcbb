# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest

from app.models.random_model import build_preset


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small random model, which nobody changes."""
    return build_preset("tiny-llama", tmp_path_factory.mktemp("models") / "tiny-llama")
