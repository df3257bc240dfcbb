# SPDX-License-Identifier: Apache-2.0
"""Extensions of vLLM's attention backends: rows that read other KV than the blocks of their requests.

For subclasses of a backend's builder and implementation (:mod:`.cpu`, :mod:`.gpu`). A step without such rows takes
vLLM's own path untouched; in a mixed step, vLLM's own code computes the other tokens.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor
from vllm.distributed.kv_transfer import has_kv_transfer_group
from vllm.v1.attention.backend import CommonAttentionMetadata

from engine_ext.core.attention.probes import Probes, ProbingRow
from engine_ext.core.attention.readers import Reader, Readers
from engine_ext.core.attention.requests import AttendingRequests, Step
from engine_ext.core.attention.rows import BatchRow, rows_of
from engine_ext.core.connector import chunk_connector
from kernels.paged import send

_STEP = "tessera_step"
"""Attribute of a step's metadata, which all layers share: the step's :class:`Plan`."""


class Dense(NamedTuple):
    """Tokens left to vLLM's own attention, and its metadata for them."""

    tokens: Tensor
    metadata: Any


class Tensors(NamedTuple):
    """A step's tensors in one layer, and the layer's KV cache."""

    query: Tensor
    key: Tensor
    value: Tensor
    kv_cache: Tensor
    output: Tensor


class Computed(Protocol):
    """Tokens of a step that one kind of readers computes."""

    def concerns(self, layer: str) -> bool:
        """Whether they are computed here in this layer."""

    def compute(self, impl: Any, layer: Any, given: Tensors) -> None:
        """Computes their attention in a layer."""


class _Probed(NamedTuple):
    """Tokens of probes."""

    probes: Probes
    rows: list[ProbingRow]

    def concerns(self, layer: str) -> bool:
        return True

    def compute(self, impl: Any, layer: Any, given: Tensors) -> None:
        query, key, value, _, output = given
        self.probes.attend(layer.layer_name, query, key, value, output, self.rows, impl.scale)


class _Attended(NamedTuple):
    """Tokens that attend to the pool."""

    requests: AttendingRequests
    step: Step

    def concerns(self, layer: str) -> bool:
        return True

    def compute(self, impl: Any, layer: Any, given: Tensors) -> None:
        self.requests.attend(layer.layer_name, given.query, given.output, self.step, impl.scale)


class Plan(NamedTuple):
    """A step beyond vLLM's attention: ``computed`` tokens, and ``dense`` ones beside them, if any.

    Attending to the pool, as probes do, and a budget of blocks exclude one another.
    """

    computed: list[Computed]
    dense: Dense | None


class ExtendedBuilder:
    """Makes metadata that can make metadata of some of its tokens. Stands before vLLM's builder among the bases."""

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Any:
        """As vLLM's; the step is planned in the first layer, when the connector has its work."""
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)  # type: ignore[misc]
        metadata.tessera_plan = lambda: self._plan(common_attn_metadata)
        return metadata

    def _plan(self, common: CommonAttentionMetadata) -> Plan | None:
        readers = _registered()
        if readers is None or readers.are_idle:
            return None
        # On a device this waits for it, in steps with such requests alone.
        starts, lengths = (each.tolist() for each in (common.query_start_loc_cpu, common.seq_lens))
        rows = rows_of(readers.request_ids(common.req_idx), starts, lengths, common.block_table_tensor)
        computed, dense = list[Computed](), None
        for reader in readers:
            if not (step := reader.step(rows)):
                continue
            computed.append(self._computed(common, reader, step))
            if not isinstance(reader, Probes):
                dense = self._dense(common, step.dense)
        return Plan(computed, dense) if computed else None

    def _computed(self, common: CommonAttentionMetadata, reader: Reader, step: Any) -> Computed:
        """A reader's part of a step."""
        if isinstance(reader, Probes):
            return _Probed(reader, step)
        assert isinstance(reader, AttendingRequests)
        return _Attended(reader, step)

    def _dense(self, common: CommonAttentionMetadata, rows: Sequence[tuple[int, BatchRow]]) -> Dense | None:
        if not rows:
            return None
        device = common.seq_lens.device
        numbers = send(torch.tensor([number for number, _ in rows]), device)
        tokens = send(torch.tensor([row.first + token for _, row in rows for token in range(row.num_tokens)]), device)
        chosen = of_rows(
            common,
            [row.num_tokens for _, row in rows],
            [row.length for _, row in rows],
            common.block_table_tensor[numbers].contiguous(),
            common.slot_mapping[tokens],
        )
        return Dense(tokens, super().build(0, chosen))  # type: ignore[misc]


class ExtendedImpl:
    """Computes such rows, all others as vLLM does. Stands before vLLM's implementation among the bases."""

    attends_to_pool = True

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """As vLLM's."""
        plan = _plan_of(attn_metadata)
        computed = [each for each in plan.computed if each.concerns(layer.layer_name)] if plan is not None else []
        own: Any = super()
        if plan is None or not computed:
            result: Tensor = own.forward(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
            return result
        if plan.dense is not None:
            tokens, metadata = plan.dense
            dense = torch.empty_like(output[tokens])
            own.forward(layer, query[tokens], key, value, kv_cache, metadata, dense, *args, **kwargs)
            output[tokens] = dense
        given = Tensors(query, key, value, kv_cache, output.view(query.shape))
        for each in computed:
            each.compute(self, layer, given)
        return output


class ExtendedBackend:
    """A backend by the name of vLLM's, with these parts. Stands before vLLM's backend among the bases."""

    builder: ClassVar[type[ExtendedBuilder]]
    impl: ClassVar[type[ExtendedImpl]]

    @classmethod
    def get_builder_cls(cls) -> Any:
        """As vLLM's."""
        return cls.builder

    @classmethod
    def get_impl_cls(cls) -> Any:
        """As vLLM's."""
        return cls.impl


def _registered() -> Readers | None:
    """The readers of this process's worker; ``None`` before it has one, as in vLLM's profiling run."""
    if not has_kv_transfer_group() or (worker := chunk_connector().worker) is None:
        return None
    return worker.readers


def _plan_of(metadata: Any) -> Plan | None:
    """The step's plan, made once a step; ``None`` if vLLM's own attention is all."""
    if metadata is None or not hasattr(metadata, "tessera_plan"):
        return None
    if not hasattr(metadata, _STEP):
        setattr(metadata, _STEP, metadata.tessera_plan())
    plan: Plan | None = getattr(metadata, _STEP)
    return plan


def of_rows(
    common: CommonAttentionMetadata, counts: Sequence[int], lengths: Sequence[int], table: Tensor, slots: Tensor
) -> CommonAttentionMetadata:
    """Metadata of rows with ``counts`` new tokens, and ``lengths`` in all."""
    device = common.seq_lens.device
    starts = torch.tensor([0, *counts], dtype=common.query_start_loc_cpu.dtype).cumsum(0, dtype=torch.int32)
    return replace(
        common,
        query_start_loc=send(starts, device),
        query_start_loc_cpu=starts,
        seq_lens=send(torch.tensor(lengths, dtype=common.seq_lens.dtype), device),
        num_reqs=len(counts),
        num_actual_tokens=sum(counts),
        max_query_len=max(counts),
        block_table_tensor=table,
        slot_mapping=slots,
    )
