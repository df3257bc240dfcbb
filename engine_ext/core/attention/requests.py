# SPDX-License-Identifier: Apache-2.0
"""The requests of a worker that attend to segments in the pool, step by step."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from cache.windows import Window
from engine_ext.core.attention.rows import BatchRow
from engine_ext.wire.plan import Span, TransferPlan
from kernels.attention.plan import BLOCKS, AttendingRow, ChunkAttention, Run, Segment, Tail, runs_of


@dataclass(frozen=True, slots=True)
class _Context:
    """A request's context: its segments, their pages and tags, the number of tokens before its own; its windows.

    A request that ``is_probe`` is computed elsewhere (:mod:`.probes`).
    """

    segments: tuple[Segment, ...]
    spans: tuple[Span, ...]
    num_tokens: int
    windows: tuple[Window, ...]
    is_probe: bool

    @classmethod
    def of(cls, plan: TransferPlan, page_tokens: int) -> "_Context":
        segments = tuple(
            Segment(runs_of(span.pages, page_tokens, span.skipped, span.length), span.length, span.delta)
            for span in plan.loads
        )
        return cls(segments, plan.loads, plan.num_loaded_tokens, plan.windows, plan.probe is not None)

    def rows(self, row: BatchRow, block_tokens: int) -> Iterator[AttendingRow]:
        """The attention of the request's tokens in a step."""

        def runs(first: int, end: int) -> tuple[Run, ...]:
            number, skipped = divmod(first, block_tokens)
            return runs_of(row.blocks[number : -(-end // block_tokens)], block_tokens, skipped, end - first)

        if not self.windows:
            own = row.length - self.num_tokens
            yield AttendingRow(row.first, row.num_tokens, self.segments, Tail(runs(self.num_tokens, row.length), own))
            return
        begin, at = row.length - row.num_tokens, self.num_tokens
        earlier: list[tuple[Window, Segment]] = []
        for window in self.windows:
            first, end = max(begin, at), min(row.length, at + window.length)
            # The window's tokens are so many positions behind their place; all else moves along with them.
            shift = at - window.position
            if first < end:
                before = [
                    each for each, span in zip(self.segments, self.spans, strict=True) if span.start < window.start
                ]
                before += [each for other, each in earlier if other.start < window.start]
                tail = Tail(runs(at, end), end - at)
                yield AttendingRow(row.first + first - begin, end - first, before, tail, shift)
            at += window.length
            earlier.append((window, Segment(runs(at - window.length, at), window.length, -shift, BLOCKS)))


@dataclass(frozen=True, slots=True)
class Step:
    """A step with attending rows: their plan (:meth:`ChunkAttention.plan`), if they aren't all of probes.

    ``dense`` has the other rows with their numbers.
    """

    plan: Any
    dense: list[tuple[int, BatchRow]]


class AttendingRequests:
    """Requests by id, with the kernel that computes their attention. ``layers`` maps names to the kernel's numbers."""

    def __init__(
        self,
        attention: ChunkAttention,
        layers: Mapping[str, int],
        page_tokens: int,
        block_tokens: int,
    ) -> None:
        self.attention = attention
        self.layers = layers
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
        attending, dense = list[list[AttendingRow]](), list[tuple[int, BatchRow]]()
        self._ran = {}
        for number, row in enumerate(rows):
            context = self._contexts.get(row.request_id)
            if context is None:
                dense.append((number, row))
                continue
            if not context.is_probe:
                attending.append(list(context.rows(row, self._block_tokens)))
            self._ran[row.request_id] = row.blocks[(context.num_tokens - 1) // self._block_tokens]
        if not self._ran:
            return None
        return Step(self.attention.plan(attending) if attending else None, dense)

    def attend(self, layer: str, query: Tensor, output: Tensor, step: Step, scale: float) -> None:
        """See :meth:`kernels.attention.plan.ChunkAttention.attend`."""
        if step.plan is not None:
            self.attention.attend(self.layers[layer], query, output, step.plan, scale)

    def take_ran(self) -> list[tuple[str, int, tuple[Span, ...]]]:
        """The last step's requests: the block where each one's context ends, and its segments."""
        ran, self._ran = self._ran, {}
        return [(request_id, block, self._contexts[request_id].spans) for request_id, block in ran.items()]


def _has_window(window: int | tuple[int, int] | None) -> bool:
    """Whether a layer sees some tokens only, as vLLM's backends say it: tokens before, and behind; -1 is all."""
    before = window[0] if isinstance(window, tuple) else window
    return before is not None and before >= 0


def attention_reason(modules: Mapping[str, Any]) -> str | None:
    """The reason why vLLM's attention ``modules`` can't attend to the pool, if any."""
    for name, module in modules.items():
        impl = module.impl
        checks: list[tuple[Any, str]] = [
            (not getattr(impl, "attends_to_pool", False), f"{type(impl).__name__} is not extended"),
            (_has_window(getattr(impl, "sliding_window", None)), "a sliding window"),
            (getattr(impl, "logits_soft_cap", None), "capped logits"),
            (getattr(impl, "sinks", None) is not None, "attention sinks"),
            (getattr(module, "kv_sharing_target_layer_name", None), "the KV cache is another layer's"),
        ]
        if reason := next((reason for holds, reason in checks if holds), None):
            return f"layer {name}: {reason}"
    return None
