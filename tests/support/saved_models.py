# SPDX-License-Identifier: Apache-2.0
"""Models that are built and saved."""

from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoTokenizer, BloomConfig, BloomForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM


def alibi(vocab_size: int) -> PreTrainedModel:
    return BloomForCausalLM(BloomConfig(vocab_size=vocab_size, hidden_size=128, n_layer=2, n_head=2))


def large_biases(vocab_size: int) -> PreTrainedModel:
    """A model whose keys and queries have biases far above their other values, as Qwen2.5's have."""
    sizes = {"vocab_size": vocab_size, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4}
    model = Qwen2ForCausalLM(Qwen2Config(**sizes, num_attention_heads=4, num_key_value_heads=2))
    for layer in model.model.layers:
        for projection, size in ((layer.self_attn.k_proj, 40), (layer.self_attn.q_proj, 10)):
            torch.nn.init.normal_(projection.bias, std=size)
    return model


def saved(build: Callable[[int], PreTrainedModel], tokenizer_of: Path, folder: Path) -> Path:
    """Saves a model from `build` with another model's tokenizer; returns the folder."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_of)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    build(len(tokenizer)).to(torch.float32).save_pretrained(folder)
    return folder
