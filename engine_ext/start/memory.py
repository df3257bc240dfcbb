# SPDX-License-Identifier: Apache-2.0
"""The memory that vLLM plans for, and the chunk pool's place in it."""

import argparse
import os
from typing import Final

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform

from engine_ext.core import ascend

_CPU_KV_CACHE_BYTES: Final = 2 << 30
POOL_SHARE: Final = 0.15
"""Of vLLM's share of a device: a pool of 1 GiB holds 8,192 tokens of an 8B model."""
_POOL_BYTES: Final = 1 << 30


def make_room(args: AsyncEngineArgs, asked_bytes: int | None) -> int | str:
    """Bytes of each worker's pool, taken from vLLM's share of its device; the reason if nothing would be left.

    ``None`` asks for :func:`default_pool_bytes`. Where the KV cache's size is given, vLLM takes no share, and the pool
    lies beside it.
    """
    if args.kv_cache_memory_bytes is not None or (current_platform.is_cpu() and "VLLM_CPU_KVCACHE_SPACE" in os.environ):
        return asked_bytes or default_pool_bytes()
    try:
        total, share = device_bytes(), args.gpu_memory_utilization
    except OSError as error:
        return f"the size of the device's memory is unknown: {error}"
    num_bytes = asked_bytes or default_pool_bytes(int(total * share))
    if num_bytes >= total * share:
        return (
            f"the chunk pool's {_gib(num_bytes)} GiB leave nothing of vLLM's {_gib(total * share)} GiB "
            f"(--gpu-memory-utilization {share:g}): lower --chunk-cache-memory"
        )
    args.gpu_memory_utilization = share - num_bytes / total
    return num_bytes


def default_pool_bytes(share_bytes: int = 0) -> int:
    """Bytes of a worker's pool where none are asked for; ``share_bytes`` is what vLLM may take of the device."""
    return _POOL_BYTES if current_platform.is_cpu() or not share_bytes else int(share_bytes * POOL_SHARE)


def device_bytes() -> int:
    """Memory of the first device; raises :class:`OSError` if it is unknown."""
    return ascend.total_bytes() if ascend.is_ascend() else int(current_platform.get_device_total_memory())


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f}"


def set_cpu_defaults(args: argparse.Namespace) -> None:
    """Limits the KV cache on CPUs: vLLM would reserve 92 % of the machine's memory."""
    is_sized = args.kv_cache_memory_bytes is not None or "VLLM_CPU_KVCACHE_SPACE" in os.environ
    is_default = args.gpu_memory_utilization == AsyncEngineArgs.gpu_memory_utilization
    if current_platform.is_cpu() and not is_sized and is_default:
        args.kv_cache_memory_bytes = _CPU_KV_CACHE_BYTES
