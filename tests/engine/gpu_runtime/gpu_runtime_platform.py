# SPDX-License-Identifier: Apache-2.0
"""The CPU, run as vLLM runs a GPU by default: model runner V2, asynchronous scheduling, one process, small blocks.

For tests alone: `make test-gpu-runtime` puts this folder on the module path. With ``GPU_RUNTIME_ATTENTION=triton``
attention is a GPU's, too: vLLM's Triton backend, and Tessera's Triton kernels, all in the interpreter.
"""

import os
from typing import TYPE_CHECKING, Any

import torch
from vllm.logger import init_logger
from vllm.platforms.cpu import CpuPlatform

from kernels import dispatch

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)

BLOCK_SIZE = 32
"""The smallest of vLLM's attention on CPUs; GPUs have 16, as latent attention (MLA) has on CPUs too."""


class GpuRuntimePlatform(CpuPlatform):
    """vLLM's CPU platform without its restrictions on scheduling and executor."""

    @classmethod
    def check_and_update_config(cls, vllm_config: "VllmConfig") -> None:
        """Takes back what the CPU's platform turns off; several workers still have processes of their own."""
        cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
        is_block_size_given = cache.user_specified_block_size
        is_async = vllm_config.scheduler_config.async_scheduling
        super().check_and_update_config(vllm_config)
        if not is_block_size_given:
            cache.block_size = min(cache.block_size, BLOCK_SIZE)
        vllm_config.scheduler_config.async_scheduling = is_async
        if parallel.world_size == 1:
            parallel.distributed_executor_backend = "uni"
        logger.warning(
            "GPU runtime: model runner %s, asynchronous scheduling %s, executor %s, blocks of %d",
            "V2" if vllm_config.use_v2_model_runner else "V1",
            is_async,
            parallel.distributed_executor_backend,
            cache.block_size,
        )

    @classmethod
    def get_attn_backend_cls(cls, *args: Any, **kwargs: Any) -> str:
        """The name of the backend's class."""
        if os.environ.get("GPU_RUNTIME_ATTENTION") != "triton":
            return super().get_attn_backend_cls(*args, **kwargs)
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        dispatch._cpu_copier = dispatch._triton_copier
        dispatch._cpu_attention = lambda layers: dispatch._gpu_attention()
        torch.cuda.get_device_capability = lambda *_: (8, 0)  # which vLLM's cache writer asks for
        return AttentionBackendEnum.TRITON_ATTN.get_path()

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        """Collectives of data-parallel ranks, which vLLM's CPU platform lacks."""
        return "gpu_runtime_communicator.GpuRuntimeCommunicator"
