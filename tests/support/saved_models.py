# SPDX-License-Identifier: Apache-2.0
"""Models that are built and saved."""

from collections.abc import Callable
from pathlib import Path

import torch
from transformers import (
    AutoTokenizer,
    BloomConfig,
    BloomForCausalLM,
    PreTrainedModel,
)


def alibi(vocab_size: int) -> PreTrainedModel:
    return BloomForCausalLM(BloomConfig(vocab_size=vocab_size, hidden_size=128, n_layer=2, n_head=2))


def saved(build: Callable[[int], PreTrainedModel], tokenizer_of: Path, folder: Path) -> Path:
    """Saves a model from `build` with another model's tokenizer; returns the folder."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_of)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    build(len(tokenizer)).to(torch.float32).save_pretrained(folder)
    return folder
