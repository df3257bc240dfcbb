# SPDX-License-Identifier: Apache-2.0
"""CPU fakes of the torch_npu operators that Tessera calls; they refuse what NPUs refuse.

They compute as documented, and raise :class:`ContractError` where the operators would access wrong memory or do
something unexpected, often without an error on an NPU.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch import Tensor
from vllm.v1.kv_cache_interface import MLAAttentionSpec

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


class ContractError(AssertionError):
    """An invalid call of an operator."""


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ContractError(message)


class FakeTorchNpu:
    """The module `torch_npu`."""

    def _npu_reshape_and_cache(
        self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_indices: Tensor
    ) -> None:
        """Writes ND caches in place; a slot of -1 is skipped."""
        require(slot_indices.dtype == torch.int32, f"slots must be int32, not {slot_indices.dtype}")
        _write(key, value, key_cache, value_cache, slot_indices)

    def npu_scatter_pa_kv_cache(
        self,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
        *,
        compress_lens: Tensor | None = None,
        compress_seq_offsets: Tensor | None = None,
        seq_lens: Tensor | None = None,
        cache_mode: str | None = "PA_NZ",
    ) -> None:
        """Writes caches in place, by default in the NZ format."""
        require(compress_lens is compress_seq_offsets is seq_lens is None, "uncompressed tokens")
        require(cache_mode == "Norm", f"cache_mode {cache_mode} writes another format than ND")
        require(slot_mapping.dtype in (torch.int32, torch.int64), f"slots must be integers, not {slot_mapping.dtype}")
        _write(key, value, key_cache, value_cache, slot_mapping)

    def npu_rotary_mul(
        self, input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None
    ) -> Tensor:
        """`input` `[B, S, N, D]` times `r1` plus the rotated `input` times `r2`, both `[1, S, 1, D]`."""
        require(rotate is None, "rotated by its mode")
        require(all(each.dim() == 4 for each in (input, r1, r2)), "all of 4 dimensions")
        require(input.dtype in _FLOATS and input.dtype == r1.dtype == r2.dtype, "all of one floating dtype")
        batch, length, heads, width = input.shape
        require(r1.shape == r2.shape == (1, length, 1, width), f"r1 and r2 of the full width, not {tuple(r1.shape)}")
        require(batch < 1000 and heads < 1000 and width < 896 and width % 2 == 0, f"sizes {tuple(input.shape)}")
        require(bool(r1.abs().max() <= 1 and r2.abs().max() <= 1), "r1 and r2 within [-1, 1]")
        require(rotary_mode in ("half", "interleave"), f"rotary_mode {rotary_mode}")
        if rotary_mode == "half":
            first, second = input.chunk(2, dim=-1)
            turned = torch.cat((-second, first), dim=-1)
        else:
            turned = torch.stack((-input[..., 1::2], input[..., ::2]), dim=-1).flatten(-2)
        return r1 * input + r2 * turned


def _write(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    named = {"key": key, "value": value, "key_cache": key_cache, "value_cache": value_cache, "slots": slots}
    for name, tensor in named.items():
        require(tensor.is_contiguous(), f"{name} must be contiguous")
    require(slots.dim() == 1 and len(slots) == len(key) == len(value), "a slot for each token")
    kept = slots[slots != -1].long()
    require(len(kept.unique()) == len(kept), "slots must not repeat: which token wins is undefined")
    for tokens, cache in ((key, key_cache), (value, value_cache)):
        require(tokens.dim() == 3 and cache.dim() == 4, "tokens [n, heads, size], caches [blocks, tokens, heads, size]")
        require(tokens.dtype == cache.dtype and tokens.shape[1:] == cache.shape[2:], "tokens as in the cache")
        flat = cache.view(-1, *cache.shape[2:])
        require(not len(kept) or bool(kept.min() >= 0 and kept.max() < len(flat)), "slots within the cache")
        flat[kept] = tokens[slots != -1]


class DeviceOperatorA2:
    """vLLM-Ascend's `DeviceOperator` as of 0.23: passes its arguments on unchanged."""

    def __init__(self, torch_npu: FakeTorchNpu) -> None:
        self._torch_npu = torch_npu

    def reshape_and_cache(
        self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        self._torch_npu._npu_reshape_and_cache(
            key=key, value=value, key_cache=key_cache, value_cache=value_cache, slot_indices=slot_mapping
        )


class DeviceOperatorA5(DeviceOperatorA2):
    """`DeviceOperator` for newer devices, and in newer versions."""

    def reshape_and_cache(
        self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        caches = {"key_cache": key_cache, "value_cache": value_cache}
        self._torch_npu.npu_scatter_pa_kv_cache(
            key=key, value=value, **caches, slot_mapping=slot_mapping, cache_mode="Norm"
        )


DEVICE_OPERATORS = {"A2": DeviceOperatorA2, "A5": DeviceOperatorA5}


class FakeStreams:
    """`torch.npu`: Tessera may neither leave the current stream nor wait for it."""

    def __getattr__(self, name: str) -> NoReturn:
        raise ContractError(f"torch.npu.{name}: everything belongs on the current stream")


class FakeCudaEvent:
    """`torch.cuda.Event`, which on an NPU is a placeholder that orders nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise ContractError("torch.cuda.Event does nothing on an NPU")


def get_memory_info(device_index: int | None = None) -> NoReturn:
    """`torch.accelerator.get_memory_info` beside torch_npu 2.10, whose allocator lacks it."""
    raise NotImplementedError("getMemoryInfo is not implemented for this allocator yet")


class FakeNpuPlatform:
    """vLLM's `current_platform` with vLLM-Ascend's class."""

    device_type = "npu"

    def is_cpu(self) -> bool:
        return False

    def get_device_total_memory(self, device_id: int = 0) -> int:
        """Raises on purpose: an answer would use the NPU in a process whose workers could not do so then."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class FakeMLAAttentionSpec(MLAAttentionSpec):
    """vLLM-Ascend's kind of latent attention; ``compress_ratio`` is in the class of its vLLM."""

    sparse_head_dim: tuple[int, ...] | None = None
    compress_ratio: int = 1


class FakeModelFiles:
    """The module `vllm_ascend.quantization.utils`; ``hub`` has the folders of models by id."""

    def __init__(self, hub: dict[str, Path]) -> None:
        self._hub = hub

    def get_model_file(self, model: str | Path, filename: str, revision: str | None = None) -> Path | None:
        """The file in a folder, or downloaded."""
        folder = Path(model) if Path(model).exists() else self._hub.get(str(model), Path("nowhere"))
        return folder / filename if (folder / filename).exists() else None


class FakeMemPool:
    """Memory that is in use."""


class FakeCaMemAllocator:
    """vLLM-Ascend's allocator: it has the only reference to a pool, the last one of each name."""

    def __init__(self) -> None:
        self.current_tag = "default"
        self.allocator_and_pools: dict[str, FakeMemPool] = {}
        self.pointer_to_data: dict[int, SimpleNamespace] = {}

    def get_instance(self) -> "FakeCaMemAllocator":
        return self

    @contextmanager
    def use_allocation_tag(self, tag: str) -> Iterator[None]:
        old_tag, self.current_tag = self.current_tag, tag
        try:
            yield
        finally:
            self.current_tag = old_tag

    @contextmanager
    def use_memory_pool(self, tag: str | None = None) -> Iterator[None]:
        old_tag, self.current_tag = self.current_tag, tag or "default"
        self.allocator_and_pools[self.current_tag] = FakeMemPool()
        yield
        self.current_tag = old_tag

    def python_malloc_callback(self, allocation_handle: tuple[int, int, int, int]) -> None:
        """Called for each allocation within a pool; the handle's third number is its address."""
        self.pointer_to_data[allocation_handle[2]] = SimpleNamespace(tag=self.current_tag)
