# SPDX-License-Identifier: Apache-2.0
"""A connector and a worker extension with one injected fault, for the self-check to catch."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor
from vllm.distributed.kv_transfer import get_kv_transfer_group

from engine_ext.core.attention.requests import AttendingRequests
from engine_ext.core.connector import ChunkCacheConnector
from engine_ext.core.layers import AttentionLayer
from engine_ext.core.scheduler import SchedulerHalf
from engine_ext.core.worker import PoolDescription, WorkerHalf
from engine_ext.core.worker_extension import ChunkCacheWorkerExtension
from engine_ext.wire.plan import BlockTransfer
from kernels.attention.numba_attention import NumbaAttention
from kernels.attention.plan import PREFILL_TOKENS, AttentionPlan
from kernels.dispatch import copier_for
from kernels.layout import BlockLayout, OperandLayout
from kernels.rope import RotaryFrequencies


class FaultyWorkerHalf(WorkerHalf):
    fault = "none"

    def prepare(self, attention_layers: Sequence[AttentionLayer], reshape_and_cache: Any = None) -> PoolDescription:
        description = super().prepare(attention_layers, reshape_and_cache)
        right = self.copier.layers[-1].frequencies
        if self.fault == "wrong frequency":
            self._rotate_last_layer_by(RotaryFrequencies(right.inv_freq * 1.001, right.is_neox))
        elif self.fault == "wrong pairing":
            self._rotate_last_layer_by(RotaryFrequencies(right.inv_freq, not right.is_neox))
        return description

    def prepare_attention(self, layers: Sequence[str]) -> None:
        super().prepare_attention(layers)
        attending = self.readers.get(AttendingRequests)
        assert attending is not None
        attending.attention = FaultyAttention(self)

    def _rotate_last_layer_by(self, frequencies: RotaryFrequencies) -> None:
        *others, last = self.copier.layers
        self.copier = copier_for([*others, replace(last, frequencies=frequencies)])

    def probe(self, layer: AttentionLayer) -> BlockLayout:
        layout = super().probe(layer)
        if self.fault == "swapped K and V":
            return BlockLayout(layout.num_blocks, layout.value, layout.key)
        if self.fault == "transposed K":
            return BlockLayout(layout.num_blocks, _transposed(layout.key), layout.value)
        return layout

    def load(self, transfers: Sequence[BlockTransfer]) -> None:
        if self.fault == "wrong sign":
            transfers = [_negated(transfer) for transfer in transfers]
        if self.fault != "nothing loaded":
            super().load(transfers)


class FaultyAttention(NumbaAttention):
    """Attention with the fault of a worker half."""

    def __init__(self, half: FaultyWorkerHalf) -> None:
        super().__init__(half.copier.layers)
        self._half = half

    def attend(self, number: int, query: Tensor, output: Tensor, plan: AttentionPlan, scale: float) -> None:
        if self._half.fault == "wrong turn":
            plan = replace(plan, deltas=-plan.deltas)
        elif self._half.fault == "wrong scale" or (
            self._half.fault == "wrong if long" and len(plan.tokens) >= PREFILL_TOKENS
        ):
            scale *= 1.5
        elif self._half.fault == "missing segment":
            plan = replace(plan, pieces=plan.pieces[1:])
        super().attend(number, query, output, plan, scale)


LOST = (251, 252)
"""A prompt that ends in these tokens and n loses its request's first n saves."""


class FaultySchedulerHalf(SchedulerHalf):
    def __init__(self, hash_algorithm: str, block_tokens: int) -> None:
        super().__init__(hash_algorithm, block_tokens)
        self._lost: Counter[tuple[int, ...]] = Counter()

    def add_request(self, request: Any) -> None:
        super().add_request(request)
        tracked, prompt = self._tracked.get(request.request_id), tuple(request.prompt_token_ids)
        if tracked and tracked.plan.saves and prompt[-3:-1] == LOST and self._lost[prompt] < prompt[-1]:
            self._lost[prompt] += 1
            tracked.num_prompt_tokens += 1 << 30  # a prefill whose end it never sees


class FaultyConnector(ChunkCacheConnector):
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if self.scheduler is not None:
            cache = vllm_config.cache_config
            self.scheduler = FaultySchedulerHalf(cache.prefix_caching_hash_algo, cache.block_size)
        if self.worker is not None:
            half = self.worker
            self.worker = FaultyWorkerHalf(half.pool_bytes, half.page_tokens, half.engine_block_size)


class FaultyWorkerExtension(ChunkCacheWorkerExtension):
    def inject_fault(self, fault: str) -> None:
        connector = get_kv_transfer_group()
        assert isinstance(connector, FaultyConnector)
        assert isinstance(connector.worker, FaultyWorkerHalf)
        connector.worker.fault = fault


def _transposed(operand: OperandLayout) -> OperandLayout:
    """Swaps tokens and dimensions, as a row-major view of a column-major key would."""
    tokens, dims = replace(operand.tokens, step=operand.dims.size), replace(operand.dims, step=1)
    return replace(operand, tokens=tokens, dims=dims)


def _negated(transfer: BlockTransfer) -> BlockTransfer:
    spans = tuple(type(s)(s.start, s.length, -s.delta, s.tag, s.pages) for s in transfer.spans)
    return BlockTransfer(transfer.request_id, transfer.block_ids, transfer.first_token, spans)
