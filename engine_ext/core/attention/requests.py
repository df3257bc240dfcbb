# SPDX-License-Identifier: Apache-2.0
"""The requests of a worker that attend to segments in the pool, step by step.

Which row of a step belongs to which request is known from the model runner's batch.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from engine_ext.core.attention.rows import BatchRow
from engine_ext.wire.plan import Span, TransferPlan
from kernels.attention.plan import AttendingRow, AttentionPlan, ChunkAttention, PooledSegment, Tail, plan_step, runs_of


@dataclass(frozen=True, slots=True)
class _Context:
    """A request's context: its segments, their pages and tags, and the number of tokens."""

    segments: tuple[PooledSegment, ...]
    spans: tuple[Span, ...]
    num_tokens: int

    @classmethod
    def of(cls, plan: TransferPlan, page_tokens: int) -> "_Context":
        segments = tuple(
            PooledSegment(runs_of(span.pages, page_tokens, span.skipped, span.length), span.length, span.delta)
            for span in plan.loads
        )
        return cls(segments, plan.loads, plan.num_loaded_tokens)


@dataclass(frozen=True, slots=True)
class Step:
    """A step with attending rows: their plan, and the other rows with their numbers."""

    plan: AttentionPlan
    dense: list[tuple[int, BatchRow]]


class AttendingRequests:
    """Requests by id, with the kernel that computes their attention.

    ``layers`` maps names to the kernel's numbers, ``request_ids`` returns the requests of a step's rows, in order.
    """

    def __init__(
        self,
        attention: ChunkAttention,
        layers: Mapping[str, int],
        request_ids: Callable[[], Sequence[str]],
        page_tokens: int,
        block_tokens: int,
    ) -> None:
        self.attention = attention
        self.layers = layers
        self._request_ids = request_ids
        self._page_tokens = page_tokens
        self._block_tokens = block_tokens
        self._contexts: dict[str, _Context] = {}
        self._ran: dict[str, int] = {}

    def update(self, started: Mapping[str, TransferPlan], ended: Iterable[str]) -> None:
        """Takes in new requests, and forgets ended ones."""
        for request_id in ended:
            self._contexts.pop(request_id, None)
        for request_id, plan in started.items():
            if plan.attends:
                self._contexts[request_id] = _Context.of(plan, self._page_tokens)

    @property
    def is_idle(self) -> bool:
        """Whether no request is under way."""
        return not self._contexts

    def step(self, rows: Sequence[BatchRow]) -> Step | None:
        """Plans a step; ``None`` if no row of it attends to the pool."""
        attending, dense = [], []
        for number, (request_id, row) in enumerate(zip(self._request_ids(), rows, strict=False)):
            context = self._contexts.get(request_id)
            if context is None:
                dense.append((number, row))
            else:
                attending.append(self._attending(context, row))
                self._ran[request_id] = row.blocks[(context.num_tokens - 1) // self._block_tokens]
        return Step(plan_step(attending), dense) if attending else None

    def attend(self, layer: str, query: Tensor, output: Tensor, step: Step, scale: float) -> None:
        """See :meth:`kernels.attention.plan.ChunkAttention.attend`."""
        self.attention.attend(self.layers[layer], query, output, step.plan, scale)

    def take_ran(self) -> list[tuple[int, tuple[Span, ...]]]:
        """The last step's requests: the block where each one's context ends, and its segments."""
        ran, self._ran = self._ran, {}
        return [(block, self._contexts[request_id].spans) for request_id, block in ran.items()]

    def _attending(self, context: _Context, row: BatchRow) -> AttendingRow:
        first, skipped = divmod(context.num_tokens, self._block_tokens)
        length = row.length - context.num_tokens
        runs = runs_of(row.blocks[first:], self._block_tokens, skipped, length)
        return AttendingRow(row.first, row.num_tokens, context.segments, Tail(runs, length))


def attention_reason(modules: Mapping[str, Any]) -> str | None:
    """The reason why vLLM's attention ``modules`` can't attend to the pool, if any."""
    for name, module in modules.items():
        impl = module.impl
        checks: list[tuple[Any, str]] = [
            (not getattr(impl, "attends_to_pool", False), f"{type(impl).__name__} is not extended"),
            ((getattr(impl, "sliding_window", None) or -1) >= 0, "a sliding window"),
            (getattr(impl, "logits_soft_cap", None), "capped logits"),
            (getattr(impl, "sinks", None) is not None, "attention sinks"),
            (getattr(module, "kv_sharing_target_layer_name", None), "the KV cache is another layer's"),
        ]
        if reason := next((reason for holds, reason in checks if holds), None):
            return f"layer {name}: {reason}"
    return None
