# SPDX-License-Identifier: Apache-2.0
"""Differences on Ascend NPUs; the only file that imports vLLM-Ascend.

Written after vllm-ascend 0.23.0.post1; not run on an NPU yet (``docs/status.md``).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import Tensor
from vllm.platforms import current_platform

from kernels.npu_copier import ReshapeAndCache

if TYPE_CHECKING:
    from vllm.config import VllmConfig


POOL_TAG = "kv_cache"
"""vLLM's tag of KV cache memory: sleep frees memory by tag, and ``wake_up`` maps only tags that it is given."""


def is_ascend() -> bool:
    """Whether vLLM runs on Ascend NPUs."""
    return str(current_platform.device_type) == "npu"


def reshape_and_cache() -> ReshapeAndCache:
    """vLLM-Ascend's writer of K and V, which calls the device's own operator."""
    from vllm_ascend.device.device_op import DeviceOperator

    write: ReshapeAndCache = DeviceOperator.reshape_and_cache
    return write


def write_tokens(key_cache: Tensor, value_cache: Tensor, key: Tensor, value: Tensor, slots: Tensor) -> None:
    """Writes K and V ``[T, heads, head size]`` to slots, int64 ``[T]``, through the engine."""
    reshape_and_cache()(
        key=key, value=value, key_cache=key_cache, value_cache=value_cache, slot_mapping=slots.int().contiguous()
    )


def unsupported_reason(config: "VllmConfig") -> str | None:
    """The reason why KV can't be moved token by token with this device and model."""
    from vllm_ascend.ascend_config import get_ascend_config
    from vllm_ascend.utils import is_310p

    checks = [
        (is_310p(), "Ascend 310P keeps its KV cache in the NZ format"),
        (get_ascend_config().enable_kv_nz, "enable_kv_nz keeps the KV cache in the NZ format; switch it off"),
        (hasattr(config.model_config.hf_text_config, "index_topk"), "sparse attention (DSA) keeps an index beside K"),
    ]
    return next((reason for is_so, reason in checks if is_so), None)


@contextmanager
def pool_memory(config: "VllmConfig") -> Iterator[None]:
    """Memory that sleep frees (``--enable-sleep-mode``)."""
    if not config.model_config.enable_sleep_mode:
        yield
        return
    from vllm_ascend.device_allocator.camem import CaMemAllocator

    with CaMemAllocator.get_instance().use_memory_pool(tag=POOL_TAG):
        yield
