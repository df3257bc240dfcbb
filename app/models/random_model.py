# SPDX-License-Identifier: Apache-2.0
"""Small models with random weights, to test and measure Tessera without a download.

Answers are meaningless, but depend on every prompt token and its position, as tests need: the weights' scale keeps
attention far from uniform and next-token scores far from ties. Greedy text is printable ASCII and never ends by itself.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from app.models.random_tokenizer import BOS, EOS, SPECIAL_TOKENS, save_tokenizer, vocabulary, vocabulary_size
from machine.folders import replaced_folder, tessera_home

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BUILDER_VERSION = 2
"""Incremented when a spec's files change, so that existing folders are rebuilt."""

SPEC_FILE = "tessera_random_model.json"


@dataclass(frozen=True)
class RandomModelSpec:
    """Specification that fully determines a random model's files."""

    architecture: Literal["llama", "qwen3"] = "llama"
    hidden_size: int = 256
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    intermediate_size: int = 512
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    max_position_embeddings: int = 8192
    rope_theta: float = 10_000.0
    rope_scaling: dict[str, Any] | None = None
    """Further RoPE parameters as transformers names them, e.g. `{"rope_type": "yarn", "factor": 4.0}`."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.architecture not in ("llama", "qwen3"):
            raise ValueError(f"architecture must be llama or qwen3, not {self.architecture!r}")
        if self.dtype not in ("float32", "bfloat16", "float16"):
            raise ValueError(f"dtype must be float32, bfloat16 or float16, not {self.dtype!r}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} heads can't share {self.num_kv_heads} KV heads evenly")


PRESETS: dict[str, RandomModelSpec] = {
    "tiny-llama": RandomModelSpec(),
    "tiny-llama-mha": RandomModelSpec(num_heads=2, num_kv_heads=2, head_dim=128),
    "tiny-qwen3": RandomModelSpec(architecture="qwen3", head_dim=128),
    "tiny-qwen3-mha": RandomModelSpec(architecture="qwen3", num_kv_heads=4),
    "bench-100m": RandomModelSpec(
        hidden_size=768,
        num_layers=12,
        num_heads=12,
        num_kv_heads=4,
        intermediate_size=3072,
        max_position_embeddings=20_480,
    ),
}


def default_model_dir() -> Path:
    """Default folder for built models."""
    return tessera_home() / "models"


def build_preset(name: str, path: str | os.PathLike[str] | None = None, **fields: Any) -> Path:
    """Builds the preset `name`, with `fields` of its spec replaced, unless it exists."""
    if name not in PRESETS:
        raise ValueError(f"no random model is called {name!r}; choose from {', '.join(PRESETS)}")
    spec = dataclasses.replace(PRESETS[name], **fields)
    if path is None:
        digest = hashlib.sha256(_spec_json(spec).encode()).hexdigest()
        path = default_model_dir() / (name if spec == PRESETS[name] else f"{name}-{digest[:8]}")
    return build_random_model(path, spec)


def build_random_model(path: str | os.PathLike[str], spec: RandomModelSpec | None = None, /, **fields: Any) -> Path:
    """Writes a model of `spec` (default: tiny-llama), with `fields` replaced, to the folder `path`.

    Keeps a finished folder of the same spec, replaces a random model of another spec, and raises `FileExistsError` for
    anything else. Files appear at `path` atomically, also after interrupted builds.
    """
    spec = dataclasses.replace(spec or RandomModelSpec(), **fields)
    path = Path(path).expanduser().absolute()
    if _is_finished(path, spec):
        return path
    try:
        with replaced_folder(path, SPEC_FILE) as folder:
            save_tokenizer(folder, spec.max_position_embeddings)
            _save_model(folder, spec)
            (folder / SPEC_FILE).write_text(_spec_json(spec), encoding="utf-8")
    except OSError:
        if not _is_finished(path, spec):  # another process was faster, with the same files
            raise
    return path


def _spec_json(spec: RandomModelSpec) -> str:
    return json.dumps({"builder": BUILDER_VERSION, **dataclasses.asdict(spec)}, indent=2) + "\n"


def _is_finished(path: Path, spec: RandomModelSpec) -> bool:
    try:
        return (path / SPEC_FILE).read_text(encoding="utf-8") == _spec_json(spec)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _save_model(folder: Path, spec: RandomModelSpec) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    config_class, model_class = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    }[spec.architecture]
    config = config_class(
        vocab_size=vocabulary_size(),
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        max_position_embeddings=spec.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope_theta, **(spec.rope_scaling or {})},
        bos_token_id=SPECIAL_TOKENS.index(BOS),
        eos_token_id=SPECIAL_TOKENS.index(EOS),
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):  # keeps the caller's random state
        model = model_class(config)
    fill_weights(model, spec.seed)
    with _no_progress_bars():
        model.to(getattr(torch, spec.dtype)).save_pretrained(folder)


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    from transformers.utils import logging

    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()


def fill_weights(model: PreTrainedModel, seed: int) -> None:
    """Fills a model of any architecture with random weights that depend on the seed only.

    A linear layer's gain is the ratio of its output's size to a normalised input's. With gain 1 for queries and keys,
    attention scores have a standard deviation of 1; transformers' default of 0.02 makes attention nearly uniform. The
    attention's output has a larger gain, to compensate for averaging over many values.

    Larger gains make answers more sensitive, but also amplify rounding: RoPE's angles are in single precision, so
    moving a prompt by 6000 positions changes log probabilities by 3e-5 with these gains, and by 8e-4 with 1.4 for
    queries and keys and 3 for the other two. Replacing one chunk of six changes them by 0.4 with these gains.
    """
    import torch

    gains = {"o_proj": 2.0, "lm_head": 1.5}
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        for name, weight in model.named_parameters():
            layer = name.split(".")[-2]
            noise = torch.randn(weight.shape, generator=generator)
            if weight is embedding and weight is not head:
                weight.copy_(noise)
            elif name.endswith("bias"):
                weight.copy_(0.1 * noise)
            elif weight.dim() == 1:
                weight.copy_(1.0 + 0.1 * noise)
            else:
                weight.copy_(noise * (gains.get(layer, 1.0) / math.sqrt(weight.shape[-1])))
        # Keeps greedy text printable: all other tokens score about 0, the best printable one about 4.
        rows = torch.full((len(head), 1), 0.1)
        rows[[i for i, token in enumerate(vocabulary()) if len(token) == 1 and token.isascii()]] = 1.0
        head.mul_(rows)
