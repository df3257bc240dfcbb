# SPDX-License-Identifier: Apache-2.0
"""A tiny model, its template, and passages."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from app.documents.document import Document
from app.models.random_model import build_preset
from app.prompt.tokenization import SegmentTokenizer
from training.adapt import trainer
from training.adapt.material import Material, Template
from training.adapt.model import load


@pytest.fixture(autouse=True)
def few_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "SAMPLES_A_STEP", 2)
    monkeypatch.setattr(trainer, "_HELD_OUT_SAMPLES", 3)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_preset("tiny-llama", tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture
def model(folder: Path) -> Any:
    return load(folder)


@pytest.fixture(scope="session")
def tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="session")
def segments(tokenizer: Any) -> SegmentTokenizer:
    return SegmentTokenizer(tokenizer)


@pytest.fixture(scope="session")
def material(tokenizer: Any) -> Material:
    text = "Station {0} is in Riga. Its {0} rooms are let to guests, and breakfast ends at {0}."
    passages = [Document(text.format(number)) for number in range(30)]
    return Material(passages, Template(tokenizer), (2, 3), num_tasks=2)
