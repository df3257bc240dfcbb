# SPDX-License-Identifier: Apache-2.0
"""vLLM's attention backend for CPUs, with attending rows, probes and sparse rows.

Registered in place of vLLM's backend (:mod:`engine_ext.start.plugin`) on servers that need it. A step without any of
these takes vLLM's own path untouched; in a mixed step, vLLM's own code computes the other tokens. Tokens that read some
blocks are computed by vLLM, too, each KV head with a table of its own.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.distributed.kv_transfer import has_kv_transfer_group
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from engine_ext.core.attention.decoding import DecodingSelection, SparseStep
from engine_ext.core.attention.probes import Probes, ProbingRow
from engine_ext.core.attention.readers import Readers
from engine_ext.core.attention.requests import AttendingRequests, Step
from engine_ext.core.attention.rows import BatchRow, rows_of
from engine_ext.core.connector import chunk_connector

_STEP = "tessera_step"
"""Attribute of a step's metadata, which all layers share: the step's :class:`_Plan`."""


class _Dense(NamedTuple):
    """Tokens left to vLLM's own attention, and its metadata for them."""

    tokens: Tensor
    metadata: CPUAttentionMetadata


class _Tensors(NamedTuple):
    """A step's tensors in one layer, and the layer's KV cache."""

    query: Tensor
    key: Tensor
    value: Tensor
    kv_cache: Tensor
    output: Tensor


class _Probed(NamedTuple):
    """Tokens of probes."""

    probes: Probes
    rows: list[ProbingRow]

    def concerns(self, layer: str) -> bool:
        return True

    def compute(self, impl: "ChunkAttentionImpl", layer: Any, given: _Tensors) -> None:
        query, key, value, _, output = given
        self.probes.attend(layer.layer_name, query, key, value, output, self.rows, impl.scale)


class _Attended(NamedTuple):
    """Tokens that attend to the pool."""

    requests: AttendingRequests
    step: Step

    def concerns(self, layer: str) -> bool:
        return True

    def compute(self, impl: "ChunkAttentionImpl", layer: Any, given: _Tensors) -> None:
        self.requests.attend(layer.layer_name, given.query, given.output, self.step, impl.scale)


class _Sparse(NamedTuple):
    """Tokens that read some blocks, and metadata whose rows are their KV heads; it lacks the block table."""

    selection: DecodingSelection
    step: SparseStep
    metadata: CPUAttentionMetadata

    def concerns(self, layer: str) -> bool:
        return layer in self.selection.layers

    def compute(self, impl: "ChunkAttentionImpl", layer: Any, given: _Tensors) -> None:
        chosen = given.query[self.step.tokens]
        table = self.selection.table(layer.layer_name, chosen, self.step, impl.scale)
        given.output[self.step.tokens] = _of_heads(impl, layer, chosen, table, given.kv_cache, self.metadata)


class _Plan(NamedTuple):
    """A step beyond vLLM's attention: ``computed`` tokens, and ``dense`` ones beside them, if any.

    Attending to the pool, as probes do, and a budget of blocks exclude one another.
    """

    computed: list[_Probed | _Attended | _Sparse]
    dense: _Dense | None


class ChunkAttentionMetadataBuilder(CPUAttentionMetadataBuilder):
    """Makes metadata that can make metadata of some of its tokens."""

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> CPUAttentionMetadata:
        """As vLLM's; the step is planned in the first layer, when the connector has its work."""
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        metadata.tessera_plan = lambda: self._plan(common_attn_metadata)
        return metadata

    def _plan(self, common: CommonAttentionMetadata) -> _Plan | None:
        readers = _registered()
        if readers is None or readers.are_idle:
            return None
        starts, lengths = (each.tolist() for each in (common.query_start_loc_cpu, common.seq_lens))
        rows = rows_of(starts, lengths, common.block_table_tensor)
        computed, dense = list[_Probed | _Attended | _Sparse](), None
        for reader in readers:
            if not (step := reader.step(rows)):
                continue
            match reader:
                case Probes():
                    computed.append(_Probed(reader, step))
                case AttendingRequests():
                    computed.append(_Attended(reader, step))
                    dense = self._dense(common, step.dense)
                case DecodingSelection():
                    computed.append(self._sparse(common, reader, step))
                    dense = self._dense(common, step.dense)
        return _Plan(computed, dense) if computed else None

    def _dense(self, common: CommonAttentionMetadata, rows: Sequence[tuple[int, BatchRow]]) -> _Dense | None:
        if not rows:
            return None
        numbers = torch.tensor([number for number, _ in rows])
        tokens = torch.tensor([row.first + token for _, row in rows for token in range(row.num_tokens)])
        chosen = _of_rows(
            common,
            [row.num_tokens for _, row in rows],
            [row.length for _, row in rows],
            common.block_table_tensor[numbers].contiguous(),
            common.slot_mapping[tokens],
        )
        return _Dense(tokens, super().build(0, chosen))

    def _sparse(self, common: CommonAttentionMetadata, selection: DecodingSelection, step: SparseStep) -> _Sparse:
        builder = copy(self)
        builder.num_heads, builder.num_kv_heads = self.num_heads // self.num_kv_heads, 1
        lengths = [length for length in step.lengths for _ in range(self.num_kv_heads)]
        nothing = common.block_table_tensor.new_empty(0)
        chosen = _of_rows(common, [1] * len(lengths), lengths, nothing, common.slot_mapping[:0])
        return _Sparse(selection, step, CPUAttentionMetadataBuilder.build(builder, 0, chosen))


class ChunkAttentionImpl(CPUAttentionBackendImpl):
    """Computes attending rows with the worker's kernel, all others as vLLM does."""

    attends_to_pool = True

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """As vLLM's."""
        plan = _plan_of(attn_metadata)
        computed = [each for each in plan.computed if each.concerns(layer.layer_name)] if plan is not None else []
        if plan is None or not computed:
            result: Tensor = super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
            return result
        if plan.dense is not None:
            tokens, metadata = plan.dense
            dense = torch.empty_like(output[tokens])
            super().forward(layer, query[tokens], key, value, kv_cache, metadata, dense, *args, **kwargs)
            output[tokens] = dense
        given = _Tensors(query, key, value, kv_cache, output.view(query.shape))
        for each in computed:
            each.compute(self, layer, given)
        return output


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


class ChunkAttentionBackend(CPUAttentionBackend):
    """vLLM's backend by the same name, with this module's parts."""

    @staticmethod
    def get_impl_cls() -> type[ChunkAttentionImpl]:
        """As vLLM's."""
        return ChunkAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[ChunkAttentionMetadataBuilder]:
        """As vLLM's."""
        return ChunkAttentionMetadataBuilder


def _registered() -> Readers | None:
    """The readers of this process's worker; ``None`` before it has one, as in vLLM's profiling run."""
    if not has_kv_transfer_group() or (worker := chunk_connector().worker) is None:
        return None
    return worker.readers


def _plan_of(metadata: CPUAttentionMetadata | None) -> _Plan | None:
    """The step's plan, made once a step; ``None`` if vLLM's own attention is all."""
    if metadata is None or not hasattr(metadata, "tessera_plan"):
        return None
    if not hasattr(metadata, _STEP):
        setattr(metadata, _STEP, metadata.tessera_plan())
    plan: _Plan | None = getattr(metadata, _STEP)
    return plan


def _of_rows(
    common: CommonAttentionMetadata, counts: Sequence[int], lengths: Sequence[int], table: Tensor, slots: Tensor
) -> CommonAttentionMetadata:
    """Metadata of rows with ``counts`` new tokens, and ``lengths`` in all."""
    starts = torch.tensor([0, *counts], dtype=common.query_start_loc_cpu.dtype).cumsum(0, dtype=torch.int32)
    return replace(
        common,
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor(lengths, dtype=common.seq_lens.dtype),
        num_reqs=len(counts),
        num_actual_tokens=sum(counts),
        max_query_len=max(counts),
        block_table_tensor=table,
        slot_mapping=slots,
    )
