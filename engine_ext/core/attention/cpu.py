# SPDX-License-Identifier: Apache-2.0
"""vLLM's attention backend for CPUs, with attending rows, probes and sparse rows.

Registered in place of vLLM's backend (:mod:`engine_ext.start.plugin`). Tokens that read some blocks are computed by
vLLM, too, each KV head with a table of its own.
"""

from copy import copy
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from engine_ext.core.attention.backend import Computed, ExtendedBackend, ExtendedBuilder, ExtendedImpl, Tensors, of_rows
from engine_ext.core.attention.decoding import DecodingSelection, SparseStep
from engine_ext.core.attention.readers import Reader


class _Sparse(NamedTuple):
    """Tokens that read some blocks, and metadata whose rows are their KV heads; it lacks the block table."""

    selection: DecodingSelection
    step: SparseStep
    metadata: CPUAttentionMetadata

    def concerns(self, layer: str) -> bool:
        return layer in self.selection.layers

    def compute(self, impl: CPUAttentionBackendImpl, layer: Any, given: Tensors) -> None:
        chosen = given.query[self.step.tokens]
        table = self.selection.table(layer.layer_name, chosen, self.step, impl.scale)
        given.output[self.step.tokens] = _of_heads(impl, layer, chosen, table, given.kv_cache, self.metadata)


class ChunkAttentionMetadataBuilder(ExtendedBuilder, CPUAttentionMetadataBuilder):
    """vLLM's, extended."""

    def _computed(self, common: CommonAttentionMetadata, reader: Reader, step: Any) -> Computed:
        if not isinstance(reader, DecodingSelection):
            return super()._computed(common, reader, step)
        builder = copy(self)
        builder.num_heads, builder.num_kv_heads = self.num_heads // self.num_kv_heads, 1
        lengths = [length for length in step.lengths for _ in range(self.num_kv_heads)]
        nothing = common.block_table_tensor.new_empty(0)
        chosen = of_rows(common, [1] * len(lengths), lengths, nothing, common.slot_mapping[:0])
        return _Sparse(reader, step, CPUAttentionMetadataBuilder.build(builder, 0, chosen))


class ChunkAttentionImpl(ExtendedImpl, CPUAttentionBackendImpl):
    """vLLM's, extended."""

    reads_some_blocks = True


def _of_heads(
    impl: CPUAttentionBackendImpl,
    layer: Any,
    query: Tensor,
    table: Tensor,
    kv_cache: Tensor,
    metadata: CPUAttentionMetadata,
) -> Tensor:
    """vLLM's attention of queries ``[tokens, heads, D]`` to the blocks ``table`` ``[tokens, KV heads, blocks]``."""
    blocks, kv_heads, block_tokens, width = kv_cache.shape
    # Each head of a block is a block of one head.
    numbers = (table * kv_heads + torch.arange(kv_heads, dtype=torch.int32)[:, None]).flatten(0, 1)
    rows = query.view(len(numbers), -1, query.shape[2])
    result, nothing = torch.empty_like(rows), rows[:0]
    caches = kv_cache.view(blocks * kv_heads, 1, block_tokens, width)
    metadata = replace(metadata, block_table=numbers)
    CPUAttentionBackendImpl.forward(impl, layer, rows, nothing, nothing, caches, metadata, result)
    return result.view(query.shape)


class ChunkAttentionBackend(ExtendedBackend, CPUAttentionBackend):
    """vLLM's, extended."""

    builder, impl = ChunkAttentionMetadataBuilder, ChunkAttentionImpl
