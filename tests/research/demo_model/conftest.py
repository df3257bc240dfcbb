# SPDX-License-Identifier: Apache-2.0
"""The tokenizer, created once, and an untrained model."""

from typing import Any

import pytest

from research.demo_model.batches import Encoder
from research.demo_model.model import MAX_LENGTH, new_model
from research.demo_model.tokenizer import train_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return train_tokenizer(0, MAX_LENGTH)


@pytest.fixture(scope="session")
def encoder(tokenizer: Any) -> Encoder:
    return Encoder(tokenizer)


@pytest.fixture
def model() -> Any:
    return new_model(0)
