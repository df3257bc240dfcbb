# SPDX-License-Identifier: Apache-2.0
"""Small random-weight models of common architectures, with their attention's shapes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from app.models.random_model import fill_weights
from app.models.random_tokenizer import save_tokenizer, vocabulary_size

MAX_POSITIONS = 1024
_COMMON = {
    "vocab_size": vocabulary_size(),
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
_WINDOW = 48
"""Shorter than the tests' prompts and than a chunk with its system segment."""
_LOCAL_AND_GLOBAL = {
    "head_dim": 64,
    "num_hidden_layers": 4,
    "sliding_window": _WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
}
_GEMMA = {**_LOCAL_AND_GLOBAL, "query_pre_attn_scalar": 64}
_GEMMA_4 = {
    **_LOCAL_AND_GLOBAL,
    "global_head_dim": 128,
    "vocab_size_per_layer_input": vocabulary_size(),
    "hidden_size_per_layer_input": 32,
}
_TEXT = "{}TextConfig"


@dataclass(frozen=True)
class Family:
    """An architecture with configuration ``fields``; ``refused`` is the reason if its chunks can't be cached."""

    architecture: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    config_class: str = "{}Config"
    refused: str | None = None
    flags: Mapping[str, Any] = field(default_factory=dict)
    """Engine arguments."""
    environment: Mapping[str, str] = field(default_factory=dict)

    def build(self, folder: Path, seed: int = 0) -> Path:
        """Writes the model's files into ``folder``."""
        make: Callable[..., PreTrainedConfig] = getattr(transformers, self.config_class.format(self.architecture))
        config = make(**{**_COMMON, **self.fields})
        with torch.random.fork_rng(devices=[]):
            model: PreTrainedModel = getattr(transformers, f"{self.architecture}ForCausalLM")(config)
        fill_weights(model, seed)
        save_tokenizer(folder, MAX_POSITIONS)
        model.to(torch.float32).save_pretrained(folder)
        return folder


def _rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **parameters}}


def _long_rope(trained: int, **fields: Any) -> dict[str, Any]:
    """Phi-3's scaling of a model that was trained with this number of positions."""
    short, long = ([1.0 + step * i for i in range(32)] for step in (0.05, 0.5))
    scaling = _rope("longrope", short_factor=short, long_factor=long, original_max_position_embeddings=trained)
    return {**scaling, "original_max_position_embeddings": trained, **fields}


_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 256}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "head_dim": 64,
    **_MOE,
}

# Without experts: on the CPU, V3's routing differs from transformers', also with the cache off.
_LATENT_V3 = {**_LATENT, "q_lora_rank": 128, "first_k_dense_replace": 2}
# The rotary operator of vLLM's CPU build miscomputes some positional parts of this attention (0.32).
_NATIVE = {"compilation_config": {"custom_ops": ["none"]}}

FAMILIES: dict[str, Family] = {
    "Llama 3 scaling": Family(
        "Llama",
        _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=128),
    ),
    "linear scaling": Family("Llama", _rope("linear", factor=4.0)),
    "dynamic NTK": Family("Llama", _rope("dynamic", factor=2.0)),
    "YaRN with magnitude": Family("Qwen2", _rope("yarn", factor=4.0, original_max_position_embeddings=256)),
    "Phi-3 long-rope, short": Family("Phi3", _long_rope(MAX_POSITIONS, max_position_embeddings=4 * MAX_POSITIONS)),
    "Phi-3 long-rope, long": Family("Phi3", _long_rope(16)),
    "partial rotary": Family("StableLm", {**_rope("default", partial_rotary_factor=0.25)}),
    "GPT-J pairs": Family("Cohere", {"logit_scale": 1.0}),
    "GPT-J": Family(
        "GPTJ",
        {
            "n_embd": 256,
            "n_layer": 2,
            "n_head": 4,
            "rotary_dim": 32,
            "n_positions": MAX_POSITIONS,
            "n_inner": 512,
            "hidden_size": 256,
            "intermediate_size": None,
        },
    ),
    "partial GPT-J pairs (GLM-4)": Family("Glm4", {"head_dim": 64, **_rope("default", partial_rotary_factor=0.5)}),
    "Qwen2": Family("Qwen2"),
    "Qwen3": Family("Qwen3", {"head_dim": 128}),
    "Mistral": Family("Mistral", {"sliding_window": None}),
    "Mistral, sliding": Family("Mistral", {"sliding_window": _WINDOW}),
    "Gemma 2": Family("Gemma2", _GEMMA),
    "Gemma 3": Family("Gemma3", _GEMMA, _TEXT),
    "Gemma 4": Family("Gemma4", _GEMMA_4, _TEXT),
    "Gemma 4, layers that share KV": Family(
        "Gemma4", {**_GEMMA_4, "global_head_dim": 64, "num_kv_shared_layers": 2}, _TEXT
    ),
    "Gemma 4, heads of two sizes and layers that share KV": Family(
        "Gemma4", {**_GEMMA_4, "num_kv_shared_layers": 2}, _TEXT
    ),
    "Granite": Family(
        "Granite",
        {"embedding_multiplier": 2.0, "attention_multiplier": 0.2, "residual_multiplier": 1.5, "logits_scaling": 0.5},
    ),
    "OLMo2": Family("Olmo2"),
    "gpt-oss": Family(
        "GptOss",
        {
            **_LOCAL_AND_GLOBAL,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 256,
            **_rope("yarn", factor=4.0, original_max_position_embeddings=256, beta_fast=32.0, beta_slow=1.0),
        },
    ),
    "Mixtral": Family("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "Qwen2-MoE": Family(
        "Qwen2Moe", {"num_experts": 4, "shared_expert_intermediate_size": 256, "decoder_sparse_step": 1, **_MOE}
    ),
    "Qwen3-MoE": Family("Qwen3Moe", {"num_experts": 4, "head_dim": 64, **_MOE}),
    "DeepSeek V2, MLA": Family("DeepseekV2", _LATENT, flags=_NATIVE),
    "DeepSeek V3, MLA": Family("DeepseekV3", _LATENT_V3, flags=_NATIVE),
    "DeepSeek V2, no MLA": Family("DeepseekV2", _LATENT, flags=_NATIVE, environment={"VLLM_MLA_DISABLE": "1"}),
    "DeepSeek V3, no MLA": Family("DeepseekV3", _LATENT_V3, flags=_NATIVE, environment={"VLLM_MLA_DISABLE": "1"}),
}
