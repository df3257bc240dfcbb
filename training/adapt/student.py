# SPDX-License-Identifier: Apache-2.0
"""The model in training: a LoRA that is active in a chunk's own tokens, beside the untouched model as the teacher."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from app.prompt.tokenization import SegmentTokenizer
from cache.positions.layout import pack, unpack
from training.adapt.material import Sample
from training.adapt.model import log_probabilities
from training.adapt.rows import Row, Way, make_row

RATE: Final = 1e-3
"""Learning rate."""
_IN_PLACE: Final = ("shared", "parallel")
"""Positions at which chunks can be shared in place."""


class Student:
    """A low-rank update of a model's matrices (https://arxiv.org/abs/2106.09685) where chunks are computed.

    That is SemPIC's (https://arxiv.org/abs/2607.28069).
    """

    def __init__(self, model: Any, segments: SegmentTokenizer, seed: int, rank: int) -> None:
        torch.manual_seed(seed)
        # Of the last layer, others read a chunk's keys and values alone.
        unread = rf".*\.layers\.{model.config.num_hidden_layers - 1}\.(?!self_attn\.[kv]_proj$).*"
        config = LoraConfig(
            r=rank, lora_alpha=2 * rank, target_modules="all-linear", exclude_modules=unread, task_type="CAUSAL_LM"
        )
        self._peft: Any = get_peft_model(model, config)
        self._segments = segments
        self._is_chunk = torch.zeros(0)
        for layer in self._peft.modules():
            if isinstance(layer, LoraLayer):
                layer.lora_B["default"].register_forward_hook(self._in_chunks)
        self.model: Any = self._peft.get_base_model()

    @torch.no_grad()
    def taught(self, sample: Sample) -> Tensor:
        """The teacher's log probabilities ``[branch tokens, vocabulary]``: full attention of the untouched model."""
        with self._peft.disable_adapter():
            return log_probabilities(self.model, make_row(sample.prompt, sample.branches, "full"))

    def log_probabilities(self, sample: Sample, way: Way) -> Tensor:
        """The student's log probabilities ``[branch tokens, vocabulary]``."""
        row = self._row(sample, way)
        self._is_chunk = row.is_chunk[None, :, None].to(self.model.device)
        # The low-rank matrices are float32, and multiplied in the model's dtype.
        dtype = self.model.dtype
        with torch.autocast(self.model.device.type, dtype, enabled=dtype != torch.float32):
            return log_probabilities(self.model, row)

    def parameters(self) -> dict[str, nn.Parameter]:
        """The low-rank matrices, by name."""
        return {name: each for name, each in self._peft.named_parameters() if each.requires_grad}

    def save(self, folder: Path) -> None:
        """Writes the adapter as PEFT does, for vLLM."""
        self._peft.save_pretrained(folder)
        (folder / "README.md").unlink(missing_ok=True)  # a form that PEFT leaves to fill in

    def _in_chunks(self, module: nn.Module, inputs: Any, update: Tensor) -> Tensor:
        """The update ``[1, n, out]`` of a matrix's output, without that of tokens outside chunks."""
        return update * self._is_chunk

    def _row(self, sample: Sample, way: Way) -> Row:
        """A sample as the server composes it; white space fills shared blocks."""
        block_tokens = sample.block_tokens if way in _IN_PLACE else None
        padded, prompt = partial(self._segments.padded, block_tokens=block_tokens), sample.prompt
        chunks = tuple(replace(chunk, packed=padded(chunk.packed)) for chunk in prompt.chunks)
        system = unpack(padded(pack(prompt.system)))
        return make_row(replace(prompt, system=system, chunks=chunks), sample.branches, way)
