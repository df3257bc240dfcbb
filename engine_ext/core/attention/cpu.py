# SPDX-License-Identifier: Apache-2.0
"""vLLM's attention backend for CPUs, with rows that read the chunk pool, and probes.

Registered in place of vLLM's backend (:mod:`engine_ext.start.plugin`) on servers with placement ``attend`` or sparse
requests. A step without such rows takes vLLM's own path untouched; in a mixed step, vLLM's own code computes the
ordinary rows. Probes are computed by vLLM, too; their queries are read besides.
"""

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

from engine_ext.core.attention.probes import ProbingRow
from engine_ext.core.attention.readers import readers
from engine_ext.core.attention.requests import Step
from engine_ext.core.attention.rows import rows_of

_STEP = "tessera_step"
"""Attribute of a step's metadata, which all layers share: the step's :class:`_Rows`."""


class _Attending(NamedTuple):
    """The attending rows of a step; ``tokens`` and ``metadata`` of its ordinary rows, if any."""

    step: Step
    tokens: Tensor
    metadata: CPUAttentionMetadata | None


class _Rows(NamedTuple):
    """The rows of a step that read the pool, and those that score segments."""

    attending: _Attending | None
    probing: list[ProbingRow]


class ChunkAttentionMetadataBuilder(CPUAttentionMetadataBuilder):
    """Makes metadata that can make metadata of some of its rows."""

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> CPUAttentionMetadata:
        """As vLLM's; the step is planned in the first layer, when the connector has its work."""
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        metadata.tessera_rows = lambda: self._rows(common_attn_metadata)
        return metadata

    def _rows(self, common: CommonAttentionMetadata) -> _Rows | None:
        if readers().are_idle:
            return None
        attending, probes = readers().attending, readers().probes
        starts, lengths = (each.tolist() for each in (common.query_start_loc_cpu, common.seq_lens))
        rows = rows_of(starts, lengths, common.block_table_tensor)
        probing = probes.step(rows) if probes is not None else []
        if attending is None or (step := attending.step(rows)) is None:
            return _Rows(None, probing) if probing else None
        tokens = [token for row in step.ordinary for token in range(starts[row], starts[row + 1])]
        metadata = super().build(0, _of_rows(common, step.ordinary, tokens)) if tokens else None
        return _Rows(_Attending(step, torch.tensor(tokens, dtype=torch.int64), metadata), probing)


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
        rows = _rows_of(attn_metadata)
        attending, probes = readers().attending, readers().probes
        if rows is not None and rows.probing and probes is not None:
            probes.score(layer.layer_name, query, rows.probing, self.scale)
        if rows is None or rows.attending is None or attending is None:
            result: Tensor = super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
            return result
        step, tokens, metadata = rows.attending
        if metadata is not None:
            ordinary = torch.empty_like(output[tokens])
            super().forward(layer, query[tokens], key, value, kv_cache, metadata, ordinary, *args, **kwargs)
            output[tokens] = ordinary
        attending.attend(layer.layer_name, query, output.view(query.shape), step, self.scale)
        return output


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


def _rows_of(metadata: CPUAttentionMetadata | None) -> _Rows | None:
    """The step's rows that read the pool, planned once a step; ``None`` without any."""
    if metadata is None or not hasattr(metadata, "tessera_rows"):
        return None
    if not hasattr(metadata, _STEP):
        setattr(metadata, _STEP, metadata.tessera_rows())
    rows: _Rows | None = getattr(metadata, _STEP)
    return rows


def _of_rows(common: CommonAttentionMetadata, rows: tuple[int, ...], tokens: list[int]) -> CommonAttentionMetadata:
    starts, chosen = common.query_start_loc_cpu, torch.tensor(rows)
    counts = starts[chosen + 1] - starts[chosen]
    starts = torch.cat([starts[:1], counts.cumsum(0, dtype=starts.dtype)])
    return replace(
        common,
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=common.seq_lens[chosen],
        num_reqs=len(rows),
        num_actual_tokens=len(tokens),
        max_query_len=int(counts.max()),
        block_table_tensor=common.block_table_tensor[chosen].contiguous(),
        slot_mapping=common.slot_mapping[torch.tensor(tokens)],
    )
