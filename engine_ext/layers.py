# SPDX-License-Identifier: Apache-2.0
"""The model's attention layers as the chunk cache needs them: cache tensor, writer, RoPE frequencies."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from engine_ext import ascend
from kernels.layout import CacheWriter
from kernels.rope import RotaryFrequencies, recover_frequencies, rotate_keys, rotation_angles


class UnsupportedModelError(ValueError):
    """The model's KV can't be re-positioned exactly; the message says why. The cache stays off."""


KVCaches = Tensor | Sequence[Tensor]
"""What vLLM registers for a layer: one tensor with K and V, or, on Ascend, one each."""


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """One attention layer: its cache, the engine's writer of it, and the frequencies its keys are rotated with.

    ``key_cache`` and ``value_cache`` are one tensor where the engine keeps K and V in one. ``write`` takes K and V
    ``[T, heads, size]`` and cache slots, int64 ``[T]``.
    """

    name: str
    key_cache: Tensor
    value_cache: Tensor
    num_kv_heads: int
    key_size: int
    value_size: int
    frequencies: RotaryFrequencies
    write: CacheWriter

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's K and V."""
        return self.num_kv_heads * (self.key_size + self.value_size) * self.key_cache.element_size()

    def kernel_blocks(self, engine_block_size: int) -> tuple[int, int]:
        """Blocks in the cache and tokens in each; a scheduler's block may be several of the kernel's."""
        width = self.key_size if self.value_cache is not self.key_cache else self.key_size + self.value_size
        elements = self.key_cache.numel() // (self.num_kv_heads * width)
        sizes = [size for size in self.key_cache.shape[:2] if size > 1 and elements % size == 0]
        for num_blocks in sizes:
            block_size = elements // num_blocks
            if engine_block_size % block_size == 0:
                return num_blocks, block_size
        raise UnsupportedModelError(
            f"layer {self.name}: no block dimension in a cache of shape {tuple(self.key_cache.shape)} "
            f"for {self.num_kv_heads} heads of {self.key_size} and blocks of {engine_block_size} tokens"
        )


def attention_layers(
    model: nn.Module, modules: Mapping[str, Any], kv_caches: Mapping[str, KVCaches]
) -> list[AttentionLayer]:
    """Every layer with a KV cache. ``modules`` maps layer names to vLLM's attention modules.

    Raises :class:`UnsupportedModelError` if one of them can't be re-positioned.
    """
    if not kv_caches:
        raise UnsupportedModelError("the model has no KV cache")
    rotary = _rotary_by_layer(model)
    frequencies: dict[tuple[int, bool], RotaryFrequencies] = {}
    layers = []
    for name, kv_cache in kv_caches.items():
        module = modules[name]
        _check_layer(name, module, kv_cache)
        if name not in rotary:
            raise UnsupportedModelError(f"layer {name} has no rotary embedding that could be found")
        rope = rotary[name]
        key = id(rope), _is_latent(module)
        if key not in frequencies:
            found = _frequencies(name, rope)
            # Ascend stores latent attention's keys with the halves of their pairs apart, whatever the model's style.
            frequencies[key] = replace(found, is_neox=True) if _is_latent(module) else found
        layers.append(_layer(name, module, kv_cache, frequencies[key]))
    return layers


def _layer(name: str, module: Any, kv_cache: KVCaches, frequencies: RotaryFrequencies) -> AttentionLayer:
    if isinstance(kv_cache, Tensor):
        sizes = module.head_size, getattr(module, "head_size_v", module.head_size)
        write = partial(_write_tokens, module, kv_cache)
        return AttentionLayer(name, kv_cache, kv_cache, module.num_kv_heads, *sizes, frequencies, write)
    key_cache, value_cache = reversed(kv_cache) if _is_latent(module) else kv_cache
    heads, key_size, value_size = key_cache.shape[2], key_cache.shape[3], value_cache.shape[3]
    write = partial(ascend.write_tokens, key_cache, value_cache)
    return AttentionLayer(name, key_cache, value_cache, heads, key_size, value_size, frequencies, write)


def _is_latent(module: Any) -> bool:
    """Multi-head latent attention: on Ascend, what RoPE turns is in the second of its caches."""
    return hasattr(module, "kv_lora_rank")


def _write_tokens(module: Any, kv_cache: Tensor, key: Tensor, value: Tensor, slots: Tensor) -> None:
    """With the attention backend's own operator."""
    module.impl.do_kv_cache_update(module, key, value, kv_cache, slots)


def _rotary_by_layer(model: nn.Module) -> dict[str, nn.Module]:
    """Rotary module by attention layer name: the one held by the innermost parent of the layer."""
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


def _check_layer(name: str, module: Any, kv_cache: KVCaches) -> None:
    _check_caches(name, (kv_cache,) if isinstance(kv_cache, Tensor) else kv_cache)
    if getattr(module, "kv_sharing_target_layer_name", None):
        raise UnsupportedModelError(f"layer {name} shares the KV cache of another layer")
    if getattr(module.impl, "alibi_slopes", None) is not None:
        raise UnsupportedModelError(f"layer {name} uses ALiBi, which depends on absolute distances in the bias")
    if getattr(module, "sliding_window", None):
        raise UnsupportedModelError(f"layer {name} attends in a sliding window of {module.sliding_window}")
    if isinstance(kv_cache, Tensor) and not hasattr(module.impl, "do_kv_cache_update"):
        raise UnsupportedModelError(f"layer {name}: {type(module.impl).__name__} has no cache writer to probe")


def _check_caches(name: str, caches: Any) -> None:
    is_pair = isinstance(caches, Sequence) and len(caches) <= 2 and all(isinstance(each, Tensor) for each in caches)
    if not is_pair or (len(caches) == 2 and not ascend.is_ascend()):
        raise UnsupportedModelError(f"layer {name} keeps a {type(caches).__name__} as KV cache, not one tensor, or two")
    for cache in caches:
        if cache.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise UnsupportedModelError(f"layer {name} has a quantized KV cache ({cache.dtype})")


def _frequencies(name: str, rope: Any) -> RotaryFrequencies:
    if not hasattr(rope, "_compute_cos_sin_cache") or not hasattr(rope, "is_neox_style"):
        raise UnsupportedModelError(f"layer {name}: {type(rope).__name__} is not a table-driven RoPE")
    # The module's own table is rounded to the model's dtype; this one is float32.
    table = rope._compute_cos_sin_cache()
    if not isinstance(table, Tensor):
        raise UnsupportedModelError(f"layer {name}: {type(rope).__name__} has more than one table")
    try:
        frequencies = recover_frequencies(table.cpu(), rope.is_neox_style)
    except ValueError as error:
        raise UnsupportedModelError(f"layer {name}: {type(rope).__name__}: {error}") from error
    _check_rotation(name, rope, frequencies, num_positions=len(table))
    return frequencies


def _check_rotation(name: str, rope: Any, frequencies: RotaryFrequencies, num_positions: int) -> None:
    """Compares rotations by small to largest deltas with the module's own: the self-check's prompts are short."""
    deltas = torch.tensor(
        [1, num_positions // 64, num_positions // 8, num_positions - 8], device=rope.cos_sin_cache.device
    )
    positions = torch.arange(4, device=deltas.device)
    keys = torch.randn(4, rope.head_size, generator=torch.Generator().manual_seed(0)).to(rope.cos_sin_cache)
    moved = [rope.forward_native(p, torch.zeros_like(keys), keys.clone())[1] for p in (positions, positions + deltas)]
    rotated = rotate_keys(moved[0][:, None], *rotation_angles(frequencies, deltas), frequencies.is_neox)[:, 0]
    worst = float((rotated.float() - moved[1].float()).abs().max())
    # The module's table has angles rounded to float32, and is itself rounded to the model's dtype.
    tolerance = 1e-3 + 1e-6 * num_positions + 16 * torch.finfo(keys.dtype).eps
    if not worst <= tolerance:
        raise UnsupportedModelError(
            f"layer {name}: {type(rope).__name__} does not rotate as its table says (off by {worst:.1e})"
        )
