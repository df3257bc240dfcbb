# SPDX-License-Identifier: Apache-2.0
"""vLLM's attention backends for NVIDIA GPUs, with rows that attend to the pool (:mod:`kernels.attention`).

Registered in place of vLLM's on servers with ``--chunk-cache-placement attend`` alone: CUDA graphs leave attention out,
since its launches differ from step to step.
"""

from typing import ClassVar

from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadataBuilder,
)

from engine_ext.core.attention.backend import ExtendedBackend, ExtendedBuilder, ExtendedImpl


class ChunkFlashBuilder(ExtendedBuilder, FlashAttentionMetadataBuilder):
    """vLLM's, extended."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER


class ChunkFlashImpl(ExtendedImpl, FlashAttentionImpl):
    """vLLM's, extended."""


class ChunkFlashBackend(ExtendedBackend, FlashAttentionBackend):
    """vLLM's, extended."""

    builder, impl = ChunkFlashBuilder, ChunkFlashImpl


class ChunkTritonBuilder(ExtendedBuilder, TritonAttentionMetadataBuilder):
    """vLLM's, extended."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER


class ChunkTritonImpl(ExtendedImpl, TritonAttentionImpl):
    """vLLM's, extended."""


class ChunkTritonBackend(ExtendedBackend, TritonAttentionBackend):
    """vLLM's, extended."""

    builder, impl = ChunkTritonBuilder, ChunkTritonImpl
