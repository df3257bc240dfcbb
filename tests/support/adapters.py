# SPDX-License-Identifier: Apache-2.0
"""Random adapters."""

import json
import shutil
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file

from engine_ext.start.chunk_adapter import NOTE
from engine_ext.start.weights import files_digest
from tests.oracle import Oracle

RANK, ALPHA = 4, 8
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj")


class Adapter(NamedTuple):
    """A random adapter in PEFT's format, and a model with the adapter merged into its weights."""

    folder: Path
    merged: Oracle

    @classmethod
    def make(cls, name: str, seed: int, model: Path, under: Path, size: float = 0.2) -> "Adapter":
        folder, merged = under / name, shutil.copytree(model, under / f"{name}-merged")
        folder.mkdir()
        random, weights, adapter = torch.Generator().manual_seed(seed), load_file(model / "model.safetensors"), {}
        for module in [name for name in weights if name.split(".")[-2] in MODULES]:
            num_out, num_in = weights[module].shape
            a = torch.randn(RANK, num_in, generator=random) * num_in**-0.5
            b = torch.randn(num_out, RANK, generator=random) * weights[module].std() * (num_in / RANK) ** 0.5 * size
            prefix = f"base_model.model.{module.removesuffix('.weight')}"
            adapter |= {f"{prefix}.lora_A.weight": a, f"{prefix}.lora_B.weight": b}
            weights[module] += ALPHA / RANK * b @ a
        save_file(adapter, folder / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": MODULES, "bias": "none"}
        (folder / "adapter_config.json").write_text(json.dumps(config))
        save_file(weights, merged / "model.safetensors", {"format": "pt"})
        return cls(folder, Oracle(merged))


class ChunkAdapter(NamedTuple):
    """A random adapter for writing, with weights as large as the model's, and what answers with it must be."""

    folder: Path
    oracle: Oracle

    @classmethod
    def make(cls, name: str, model: Path, under: Path) -> "ChunkAdapter":
        made = Adapter.make(name, len(name), model, under, size=1)
        note = {"weights": files_digest(model), "positions": ["parallel"]}
        (made.folder / NOTE).write_text(json.dumps(note))
        return cls(made.folder, Oracle(model, writer=made.merged))
