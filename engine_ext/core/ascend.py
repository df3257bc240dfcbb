# SPDX-License-Identifier: Apache-2.0
"""Differences on Ascend NPUs; the only file that imports vLLM-Ascend.

Written after vllm-ascend 0.23.0.post1; not run on an NPU yet (``docs/status.md``).
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from vllm.platforms import current_platform

from kernels.npu_copier import ReshapeAndCache

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig


POOL_TAG = "kv_cache"
"""vLLM's tag of KV cache memory: sleep frees memory by tag, and ``wake_up`` maps only tags that it is given."""
_OWN_POOL: Final = "chunk_cache"
_ASK_MEMORY: Final = "import torch_npu; print(torch_npu.npu.mem_get_info()[1])"


def is_ascend() -> bool:
    """Whether vLLM runs on Ascend NPUs."""
    return str(current_platform.device_type) == "npu"


def total_bytes() -> int:
    """Memory of the first NPU; raises :class:`OSError` with its words if torch_npu doesn't tell.

    A process of its own asks: vLLM's workers can't use an NPU if the process that starts them has used one, so
    vLLM-Ascend's platform has no method for it.
    """
    asked = subprocess.run([sys.executable, "-c", _ASK_MEMORY], capture_output=True, text=True, check=False)
    if asked.returncode:
        raise OSError((asked.stderr.strip() or f"torch_npu ended with {asked.returncode}").splitlines()[-1])
    return int(asked.stdout.split()[-1])


def free_bytes() -> int:
    """Free memory of this worker's device, whichever it is: torch_npu has no answer for ``torch.accelerator``."""
    if not is_ascend():
        return torch.accelerator.get_memory_info()[0]
    import torch_npu

    return int(torch_npu.npu.mem_get_info()[0])


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


def is_latent(spec: Any) -> bool:
    """Whether a layer's KV is vLLM-Ascend's kind of latent attention (MLA), uncompressed, with nothing beside it."""
    if not is_ascend():
        return False
    from vllm_ascend.core.kv_cache_interface import AscendMLAAttentionSpec

    return type(spec) is AscendMLAAttentionSpec and spec.sparse_head_dim is None and spec.compress_ratio == 1


def quantizes_kv(model: "ModelConfig") -> bool:
    """Whether vLLM-Ascend would keep this model's KV cache in 8 bits (C8, or FAKQuant of latent attention).

    It reads that in a file beside the weights, wherever they are, or in the model's own configuration.
    """
    from vllm_ascend.quantization.modelslim_config import MODELSLIM_CONFIG_FILENAME
    from vllm_ascend.quantization.utils import get_model_file

    file = get_model_file(model.model, MODELSLIM_CONFIG_FILENAME, revision=model.revision)
    descriptions = [getattr(model.hf_config, "quantization_config", None) or {}]
    if file is not None:
        descriptions.append(json.loads(file.read_text(encoding="utf-8")))
    return any(each.get("kv_cache_type") == "C8" or each.get("fa_quant_type") for each in descriptions)


@contextmanager
def pool_memory(config: "VllmConfig") -> Iterator[None]:
    """Memory that sleep frees (``--enable-sleep-mode``).

    The allocator keeps one pool for each name that it is given, and a second of the same name would drop the first:
    the name is our own, and the tag, which is another thing, vLLM's.
    """
    if not config.model_config.enable_sleep_mode:
        yield
        return
    from vllm_ascend.device_allocator.camem import CaMemAllocator

    allocator = CaMemAllocator.get_instance()
    with allocator.use_memory_pool(tag=_OWN_POOL), allocator.use_allocation_tag(POOL_TAG):
        yield
