# SPDX-License-Identifier: Apache-2.0
"""Rotation of a layer's keys: the model's rotary module and its frequencies."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from kernels.rope import RotaryFrequencies, recover_frequencies, rotate_keys, rotation_angles

_STATIC_TYPES = ("default", "linear", "llama3", "yarn")
"""Types whose frequencies, in transformers' modules, don't change with a sequence's length."""


def rotary_by_layer(model: nn.Module) -> dict[str, nn.Module]:
    """Rotary module by attention layer name: that of the layer's innermost parent."""
    found = {}
    for name, parent in model.named_modules():
        rope = getattr(parent, "rotary_emb", None)
        if isinstance(rope, nn.Module):
            for child_name, child in parent.named_modules():
                if layer_name := getattr(child, "layer_name", None):
                    found[layer_name] = rope
                elif hasattr(child, "impl"):
                    found[f"{name}.{child_name}"] = rope
    return found


def frequencies_of(rope: Any, head_size: int) -> RotaryFrequencies:
    """The frequencies of ``rope`` for keys of ``head_size``; raises ValueError if it has none.

    A module for a part of the head (DeepSeek's models without latent attention) rotates its last dimensions.
    """
    if hasattr(rope, "_compute_cos_sin_cache"):
        table = _table(rope)
        found = recover_frequencies(table.cpu(), getattr(rope, "is_neox_style", True))
        _check_rotation(rope, found, num_positions=len(table))
        return _behind(head_size - rope.head_size, found)
    if hasattr(rope, "inv_freq") and hasattr(rope, "rope_type"):
        # The model's code decides which dimensions form a pair. Nearly all pair halves; the self-check verifies it.
        return recover_frequencies(_table_of_transformers(rope), is_neox=True)
    raise ValueError("not a table-driven RoPE")


def _table(rope: Any) -> Tensor:
    """The module's table before it is rounded to the model's dtype: float32 ``[positions, rotary_dim]``."""
    arguments: tuple[Any, ...] = ()
    if hasattr(rope, "use_long_rope"):
        # Phi-3's long-rope: vLLM selects one of two tables for good, by the longest sequence it serves.
        long = rope.max_position_embeddings, rope.long_factor, rope.long_mscale
        short = rope.original_max_position_embeddings, rope.short_factor, rope.short_mscale
        arguments = long if rope.use_long_rope else short
    # Where vLLM computed its own: devices round differently, which large angles multiply.
    with _cache(rope).device:
        table = rope._compute_cos_sin_cache(*arguments)
    if not isinstance(table, Tensor):
        raise ValueError("more than one table")
    return table


def _cache(rope: Any) -> Tensor:
    """The module's table as it uses it, in the model's dtype."""
    cache: Tensor = rope.long_short_cos_sin_cache if hasattr(rope, "use_long_rope") else rope.cos_sin_cache
    return cache


def _table_of_transformers(rope: Any) -> Tensor:
    """The frequencies of transformers' module, in models without code in vLLM."""
    if rope.rope_type not in _STATIC_TYPES or "layer_type" in inspect.signature(rope.forward).parameters:
        raise ValueError(f"RoPE of type {rope.rope_type!r} in transformers' own code")
    positions = torch.arange(rope.max_seq_len_cached, device=rope.inv_freq.device)[None]
    cos, sin = rope(torch.empty(0, device=rope.inv_freq.device), positions)
    half = cos.shape[-1] // 2
    if not torch.equal(cos[..., :half], cos[..., half:]):
        raise ValueError("angles that are not in halves")
    return torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=-1).float().cpu()


def _behind(skipped: int, frequencies: RotaryFrequencies) -> RotaryFrequencies:
    """Frequencies of a head whose first ``skipped`` dimensions rotate by 0, which is exact."""
    if skipped <= 0:
        return frequencies
    if frequencies.is_neox:
        raise ValueError(f"turns halves of the last {frequencies.rotary_dim} dimensions of a head")
    unturned = frequencies.inv_freq.new_zeros(skipped // 2)
    return RotaryFrequencies(torch.cat((unturned, frequencies.inv_freq)), is_neox=False)


def _check_rotation(rope: Any, frequencies: RotaryFrequencies, num_positions: int) -> None:
    """Compares rotations by small to large deltas with the module's. The self-check's prompts are short."""
    rotate = getattr(rope, "forward_native", rope.forward)
    cache = _cache(rope)
    deltas = torch.tensor([1, num_positions // 64, num_positions // 8, num_positions - 8], device=cache.device)
    positions = torch.arange(4, device=deltas.device)
    keys = torch.randn(4, rope.head_size, generator=torch.Generator().manual_seed(0)).to(cache)
    moved = [rotate(p, torch.zeros_like(keys), keys.clone())[1] for p in (positions, positions + deltas)]
    rotated = rotate_keys(moved[0][:, None], *rotation_angles(frequencies, deltas), frequencies.is_neox)[:, 0]
    worst = float((rotated.float() - moved[1].float()).abs().max())
    # The module's table has angles rounded to float32, and is itself rounded to the model's dtype.
    tolerance = 1e-3 + 1e-6 * num_positions + 16 * torch.finfo(keys.dtype).eps
    if not worst <= tolerance:
        raise ValueError(f"does not rotate as its table says (off by {worst:.1e})")
