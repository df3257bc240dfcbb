# SPDX-License-Identifier: Apache-2.0
"""The model's attention layers: cache tensor, writer, RoPE frequencies."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from vllm.v1.kv_cache_interface import SlidingWindowSpec, UniformTypeKVCacheSpecs

from engine_ext.core import ascend
from engine_ext.core.rotary import frequencies_of, rotary_by_layer
from kernels.layout import BlockLayout, CacheWriter
from kernels.paged import LayerKV, PoolMemory, make_pool
from kernels.rope import RotaryFrequencies


class UnsupportedModelError(ValueError):
    """The model's KV can't be re-positioned exactly; the message says why. The cache stays off."""


_DIMS_WITH_HEADS = 4

QUANTIZED: Final = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn}
"""Quantized KV caches that chunks can be reused in: vLLM's names, and what the cache's bytes are."""

KVCaches = Tensor | Sequence[Tensor]
"""A layer's KV cache in vLLM: one tensor with K and V, or, on Ascend, one each."""


@dataclass(frozen=True, slots=True)
class LayerCache:
    """A layer's KV cache, and the engine's writer of it.

    Of latent attention (MLA), K is the part that RoPE turns, and V the latent vector; both have one head.
    ``key_cache`` and ``value_cache`` are one tensor where the engine keeps K and V in one. ``write`` takes K and V
    ``[T, heads, size]`` and cache slots, int64 ``[T]``.
    """

    name: str
    key_cache: Tensor
    value_cache: Tensor
    num_kv_heads: int
    key_size: int
    value_size: int
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


@dataclass(frozen=True, slots=True)
class BlockTable:
    """Layers whose tokens lie in the same blocks, a KV cache group of vLLM's.

    ``window`` is the number of tokens that stay; ``None``: all.
    """

    layers: frozenset[str]
    block_tokens: int
    window: int | None


def block_tables(groups: Sequence[Any]) -> list[BlockTable]:
    """The tables of vLLM's KV cache ``groups``; none if all tokens of all layers stay in one."""
    windows = [[each.sliding_window for each in specs_of(group) if type(each) is SlidingWindowSpec] for group in groups]
    if len(groups) == 1 and not windows[0]:
        return []
    return [
        BlockTable(frozenset(group.layer_names), group.kv_cache_spec.block_size, min(of_group, default=None))
        for group, of_group in zip(groups, windows, strict=True)
    ]


def specs_of(group: Any) -> list[Any]:
    """The specifications of the layers in a KV cache group."""
    spec = group.kv_cache_spec
    return list(spec.kv_cache_specs.values()) if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """One attention layer: its cache, and the RoPE frequencies of its keys.

    ``has_sinks``: attention also goes to learned sinks. A layer that ``is_draft`` only drafts tokens, which the model
    verifies.
    """

    cache: LayerCache
    frequencies: RotaryFrequencies
    has_sinks: bool
    is_draft: bool

    def with_pool(
        self, layout: BlockLayout, num_pages: int, page_tokens: int, memory: PoolMemory | None = None
    ) -> LayerKV:
        """Views of the layer's blocks, which have this layout, with a pool of their kind, in ``memory`` if given."""
        keys, values = layout.key_view(self.cache.key_cache), layout.value_view(self.cache.value_cache)
        key_pool, value_pool = (make_pool(blocks, num_pages, page_tokens, memory) for blocks in (keys, values))
        return LayerKV(keys, values, key_pool, value_pool, self.frequencies)


def attention_layers(
    model: nn.Module, modules: Mapping[str, Any], kv_caches: Mapping[str, KVCaches], drafter: nn.Module | None = None
) -> list[AttentionLayer]:
    """Every layer with a KV cache of its own. ``modules`` maps layer names to vLLM's attention modules.

    ``drafter`` is the model that drafts tokens for ``model``, if its layers have caches too.
    Raises :class:`UnsupportedModelError` if one of them can't be re-positioned.
    """
    if not kv_caches:
        raise UnsupportedModelError("the model has no KV cache")
    drafts = rotary_by_layer(drafter) if drafter is not None else {}
    rotary = {**drafts, **rotary_by_layer(model)}
    frequencies: dict[tuple[int, int], RotaryFrequencies] = {}
    layers = []
    # In the model's order: vLLM registers layers of several tables by turns.
    for name in filter(kv_caches.__contains__, modules):
        module, kv_cache = modules[name], kv_caches[name]
        if getattr(module, "kv_sharing_target_layer_name", None):
            continue  # it reads the cache of a layer that is here
        _check_layer(name, module, kv_cache)
        if name not in rotary:
            raise UnsupportedModelError(f"layer {name} has no rotary embedding that could be found")
        cache = _cache(name, module, kv_cache)
        key = id(rotary[name]), cache.key_size
        if key not in frequencies:
            frequencies[key] = _frequencies(name, rotary[name], cache.key_size, module)
        has_sinks = getattr(module.impl, "sinks", None) is not None
        layers.append(AttentionLayer(cache, frequencies[key], has_sinks, name in drafts))
    return layers


def _frequencies(name: str, rope: nn.Module, key_size: int, module: Any) -> RotaryFrequencies:
    try:
        found = frequencies_of(rope, key_size)
    except ValueError as error:
        raise UnsupportedModelError(f"layer {name}: {type(rope).__name__}: {error}") from error
    # Ascend stores latent attention's keys with the halves of their pairs apart, whatever the model's style.
    return replace(found, is_neox=True) if _is_latent(module) and ascend.is_ascend() else found


def _cache(name: str, module: Any, kv_cache: KVCaches) -> LayerCache:
    if not isinstance(kv_cache, Tensor):
        keys, values = reversed(kv_cache) if _is_latent(module) else kv_cache
        write = partial(ascend.write_tokens, keys, values)
        return LayerCache(name, keys, values, keys.shape[2], keys.shape[3], values.shape[3], write)
    if _is_latent(module):
        # vLLM registers [blocks, 1, tokens, size]; the layer itself has no dimension for the one head.
        latent = kv_cache.squeeze(1) if kv_cache.dim() == _DIMS_WITH_HEADS else kv_cache
        write = partial(_write_latent_tokens, module, latent)
        return LayerCache(name, latent, latent, 1, module.qk_rope_head_dim, module.kv_lora_rank, write)
    sizes = module.head_size, getattr(module, "head_size_v", module.head_size)
    write = partial(_write_tokens, module, kv_cache)
    if _is_quantized(module, kv_cache):
        kv_cache = kv_cache.view(QUANTIZED[module.kv_cache_dtype])
        write = partial(_write_quantized_tokens, module, write)
    return LayerCache(name, kv_cache, kv_cache, module.num_kv_heads, *sizes, write)


def _is_latent(module: Any) -> bool:
    """Multi-head latent attention (MLA). On Ascend, the second cache has the part that RoPE rotates."""
    return hasattr(module, "kv_lora_rank")


def _write_tokens(module: Any, kv_cache: Tensor, key: Tensor, value: Tensor, slots: Tensor) -> None:
    """Writes K and V with the attention backend's own operator."""
    module.impl.do_kv_cache_update(module, key, value, kv_cache, slots)


def _is_quantized(module: Any, kv_cache: KVCaches) -> bool:
    """Whether vLLM keeps K and V in fp8, in a tensor of bytes."""
    if not isinstance(kv_cache, Tensor) or _is_latent(module):
        return False
    return kv_cache.dtype is torch.uint8 and getattr(module, "kv_cache_dtype", None) in QUANTIZED


def _write_quantized_tokens(module: Any, write: CacheWriter, key: Tensor, value: Tensor, slots: Tensor) -> None:
    """Writes K and V in units of the layer's scales, by which vLLM's operator divides."""
    write(key.to(module.dtype) * module._k_scale_float, value.to(module.dtype) * module._v_scale_float, slots)


def _write_latent_tokens(module: Any, kv_cache: Tensor, key: Tensor, value: Tensor, slots: Tensor) -> None:
    """Writes latent attention's K and V, of one head each."""
    module.impl.do_kv_cache_update(
        value[:, 0], key, kv_cache, slots, module.kv_cache_dtype, getattr(module, "_k_scale", None)
    )


def _check_layer(name: str, module: Any, kv_cache: KVCaches) -> None:
    if not _is_quantized(module, kv_cache):
        _check_caches(name, (kv_cache,) if isinstance(kv_cache, Tensor) else kv_cache)
    if getattr(module.impl, "alibi_slopes", None) is not None:
        raise UnsupportedModelError(f"layer {name} uses ALiBi, which depends on absolute distances in the bias")
    if isinstance(kv_cache, Tensor) and not hasattr(module.impl, "do_kv_cache_update"):
        raise UnsupportedModelError(f"layer {name}: {type(module.impl).__name__} has no cache writer to probe")


def _check_caches(name: str, caches: Any) -> None:
    is_pair = isinstance(caches, Sequence) and len(caches) <= 2 and all(isinstance(each, Tensor) for each in caches)
    if not is_pair or (len(caches) == 2 and not ascend.is_ascend()):
        raise UnsupportedModelError(f"layer {name} keeps a {type(caches).__name__} as KV cache, not one tensor, or two")
    for cache in caches:
        if cache.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise UnsupportedModelError(f"layer {name} has a quantized KV cache ({cache.dtype})")
