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

from engine_ext.core.attention.backend import ExtendedBuilder, ExtendedImpl


class ChunkFlashBuilder(ExtendedBuilder, FlashAttentionMetadataBuilder):
    """vLLM's, extended."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER


class ChunkFlashImpl(ExtendedImpl, FlashAttentionImpl):
    """vLLM's, extended."""


class ChunkFlashBackend(FlashAttentionBackend):
    """vLLM's backend by the same name, with this module's parts."""

    @staticmethod
    def get_impl_cls() -> type[ChunkFlashImpl]:
        """As vLLM's."""
        return ChunkFlashImpl

    @staticmethod
    def get_builder_cls() -> type[ChunkFlashBuilder]:
        """As vLLM's."""
        return ChunkFlashBuilder


class ChunkTritonBuilder(ExtendedBuilder, TritonAttentionMetadataBuilder):
    """vLLM's, extended."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER


class ChunkTritonImpl(ExtendedImpl, TritonAttentionImpl):
    """vLLM's, extended."""


class ChunkTritonBackend(TritonAttentionBackend):
    """vLLM's backend by the same name, with this module's parts."""

    @staticmethod
    def get_impl_cls() -> type[ChunkTritonImpl]:
        """As vLLM's."""
        return ChunkTritonImpl

    @staticmethod
    def get_builder_cls() -> type[ChunkTritonBuilder]:
        """As vLLM's."""
        return ChunkTritonBuilder
