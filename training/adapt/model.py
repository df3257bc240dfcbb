# SPDX-License-Identifier: Apache-2.0
"""A model of transformers that reads training rows as the server composes chunks."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AutoModelForCausalLM

from cache.positions.layout import Chunk, ChunkedPrompt, pack
from training.adapt.rows import Branch, Row, make_row

_NAME = "tessera_rows"
_TOLERANCE = 1e-3
"""Largest difference of log probabilities that the check of an architecture accepts, in float32."""


class UnknownArchitectureError(ValueError):
    """The model's attention is not known; the message says what was found."""


def load(folder: Path, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Any:
    """The model for training rows; raises :class:`UnknownArchitectureError` if it doesn't read them exactly.

    That is checked in float32, before its parameters become ``dtype``.
    """
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    model.to(device).eval()
    if reason := _unknown(model) or _difference(model):
        raise UnknownArchitectureError(f"{type(model).__name__} can't be adapted: {reason}")
    for parameter in model.parameters():  # RoPE's frequencies, which are none, stay float32
        parameter.data = parameter.data.to(dtype)
    model.set_attn_implementation(_NAME)
    return model


def log_probabilities(model: Any, row: Row) -> Tensor:
    """Predictions behind each of the branches' tokens, float32 ``[branch tokens, vocabulary]``."""
    decoder, row = model.get_decoder(), row.to(model.device)
    found = decoder(
        input_ids=row.ids,
        position_ids=row.positions,
        attention_mask=None,
        use_cache=False,
        row=row,
        turn=_angles(decoder, row.turns),
    )
    logits: Tensor = model.lm_head(found.last_hidden_state[0, row.num_context :])
    return logits.float().log_softmax(-1)


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *, row: Row, turn: Any, **options: Any
) -> tuple[Tensor, None]:
    """Attention ``[1, heads, tokens, D]`` in two parts: the context's own, and the branches' over turned keys."""
    scale, end = options["scaling"], row.num_context
    mask, branch_mask = row.context_mask, row.branch_mask
    turned = torch.cat([_turned(key[:, :, :end], *turn), key[:, :, end:]], dim=2)
    given = {"scale": scale, "enable_gqa": True}
    parts = (
        scaled_dot_product_attention(query[:, :, :end], key[:, :, :end], value[:, :, :end], attn_mask=mask, **given),
        scaled_dot_product_attention(query[:, :, end:], turned, value, attn_mask=branch_mask, **given),
    )
    return torch.cat(parts, dim=2).transpose(1, 2), None


AttentionInterface.register(_NAME, _attend)


def _turned(key: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Keys rotated by RoPE's angles, in float32, and rounded to their dtype; pairs are (i, i + D / 2)."""
    half = key.shape[-1] // 2
    swapped = torch.cat([-key[..., half:], key[..., :half]], dim=-1)
    return (key * cos + swapped * sin).to(key.dtype)


def _angles(decoder: Any, turns: Tensor) -> tuple[Tensor, Tensor]:
    rotary = decoder.rotary_emb
    cos, sin = rotary(torch.zeros(1, device=turns.device), turns[None])
    # A magnitude (YaRN) is in the keys already.
    return cos[:, None] / rotary.attention_scaling, sin[:, None] / rotary.attention_scaling


def _unknown(model: Any) -> str | None:
    """The reason why the architecture is unknown, if it is."""
    layer_types = set(getattr(model.config, "layer_types", None) or ["full_attention"])
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    if layer_types != {"full_attention"}:
        return f"its layers are of the types {', '.join(sorted(layer_types))}; only full attention is supported"
    if not hasattr(decoder, "rotary_emb") or not hasattr(model, "lm_head"):
        return "it has no rotary_emb and lm_head where Llama has them"
    return None


@torch.no_grad()
def _difference(model: Any) -> str | None:
    """Compares rows with the model's own attention, and turned keys with moved questions."""
    vocabulary = model.config.vocab_size
    system, *chunks = ([(7 * i + 3 * n) % vocabulary for i in range(n)] for n in (5, 9, 6))
    branch = Branch(tuple(i % vocabulary for i in (11, 12, 13)), (14 % vocabulary, 15 % vocabulary))
    prompt = ChunkedPrompt(tuple(system), tuple(Chunk(pack(tuple(chunk))) for chunk in chunks), branch.question)
    own = model(input_ids=torch.tensor([[*prompt.token_ids, *branch.answer[:-1]]], device=model.device)).logits
    before = model.config._attn_implementation
    model.set_attn_implementation(_NAME)
    full, isolated = (make_row(prompt, [branch], way) for way in ("full", "shared"))
    # All keys are turned alike: as well the question can be so much nearer, and nothing turned.
    near = isolated.positions.clone()
    near[:, isolated.num_context :] -= isolated.turns[0]
    rows = (full, isolated, replace(isolated, positions=near, turns=torch.zeros_like(isolated.turns)))
    found, turned, moved = (log_probabilities(model, row) for row in rows)
    model.set_attn_implementation(before)
    expected = own[0, -len(branch.tokens) :].float().log_softmax(-1)
    far = max(float((found - expected).abs().max()), float((turned - moved).abs().max()))
    if not far <= _TOLERANCE:
        return f"its attention differs from the server's by {far:.2g} in log probability"
    return None
