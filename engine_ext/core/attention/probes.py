# SPDX-License-Identifier: Apache-2.0
"""The attention that a request's tokens pay to each token of its context, in a few layers.

A *probe* is a request that attends to its context in the pool and computes questions behind it, each as if it were
alone. Its attention is computed here, since vLLM's keeps no weights: with the model's own queries, so that what is
measured is the model's attention over the composed context. Its answer is nobody's, so layers behind the last measured
one compute none.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine_ext.core.attention.rows import BatchRow
from engine_ext.wire.plan import TransferPlan
from kernels.attention.plan import page_and_token, places_of, runs_of
from kernels.paged import LayerKV
from kernels.rope import Rotations

_MOST_LOGITS: Final = 1 << 24
Measured = tuple[int, list[float], bytes]
"""Of one question: rows, each of one token in one layer; their sum of attention to each token of the context; and, of
its tokens from the plan's ``probed_from`` on, the sum over layers of that to each span, float32 ``[tokens, spans]``."""


class _Question:
    """The sums of a question, the request's own tokens ``[first, end)``, so far.

    ``weights`` ``[context]`` are sums over ``num_rows`` rows, each one token in one layer. ``by_token`` ``[own tokens,
    spans]`` has each token's sum over layers, if the plan asks for some.
    """

    def __init__(self, plan: TransferPlan, first: int, length: int) -> None:
        self._probed_from = plan.probed_from or 0
        self._first, self._end = first, first + length
        self._num_rows = 0
        self._weights = torch.zeros(plan.num_loaded_tokens)
        self._by_token = torch.zeros(length if plan.probed_from is not None else 0, len(plan.loads))
        self._span_of = torch.repeat_interleave(torch.tensor([span.length for span in plan.loads]))

    def add(self, first: int, paid: Tensor) -> None:
        """Add the attention ``[tokens, context]`` of the request's own tokens from ``first`` on, where they are its."""
        paid = paid[max(0, self._first - first) : max(0, self._end - first)]
        self._weights += paid.sum(0)
        self._num_rows += len(paid)
        if len(self._by_token):
            first = max(first, self._first) - self._first
            self._by_token[first : first + len(paid)].index_add_(1, self._span_of, paid)

    def sums(self) -> Measured:
        """The measurements so far."""
        kept = self._by_token[self._probed_from :]
        return self._num_rows, self._weights.tolist(), kept.numpy().tobytes()


class _Running:
    """A probe under way: its questions, and its own keys and values, float32 ``[tokens, heads, D]``, by layer."""

    def __init__(self, plan: TransferPlan, page_tokens: int) -> None:
        lengths = torch.tensor([window.length for window in plan.windows])
        ends = lengths.cumsum(0)
        begins = (ends - lengths).tolist()
        self.num_context = plan.num_loaded_tokens
        self.num_seen = 0
        """Own tokens measured so far: those of a preempted request are computed again."""
        self.questions = [
            _Question(plan, begin, window.length) for begin, window in zip(begins, plan.windows, strict=True)
        ]
        self._question_of = torch.arange(len(lengths)).repeat_interleave(lengths)
        # Each question's tokens are so many positions behind their place.
        self._shifts = torch.tensor(
            [self.num_context + begin - window.position for begin, window in zip(begins, plan.windows, strict=True)]
        )[self._question_of]
        spans = torch.tensor([span.length for span in plan.loads])
        self._turns = Rotations(torch.tensor([span.delta for span in plan.loads]).repeat_interleave(spans))
        runs = [run for span in plan.loads for run in runs_of(span.pages, page_tokens, span.skipped, span.length)]
        self._places = page_and_token(torch.from_numpy(places_of(np.array(runs))[0]))
        self._own: dict[str, tuple[Tensor, Tensor]] = {}

    def row(self, tokens: slice, end: int) -> "ProbingRow":
        """These ``tokens`` of a step, the request's own up to ``end``; each token of a probe counts once."""
        own = slice(end - (tokens.stop - tokens.start), end)
        counted, self.num_seen = self.num_seen, max(self.num_seen, end)
        numbers, others = torch.arange(own.start, end), torch.arange(end)
        sees = self._question_of[numbers, None] == self._question_of[:end]
        hidden = ~(sees & (others <= numbers[:, None]))
        return ProbingRow(self, tokens, own, counted, hidden, Rotations(-self._shifts[own]))

    def read(self, layer: str, kv: LayerKV, row: "ProbingRow", key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the context and of the own tokens up to the row's, float32 ``[heads, tokens, D]``."""
        own_keys, own_values = row.turns.apply(key, kv.frequencies).float(), value.float()
        if row.own.start:
            before_keys, before_values = self._own[layer]
            own_keys = torch.cat([before_keys[: row.own.start], own_keys])
            own_values = torch.cat([before_values[: row.own.start], own_values])
        self._own[layer] = own_keys, own_values
        keys = torch.cat([self._turns.apply(kv.key_pool[self._places], kv.frequencies).float(), own_keys])
        values = torch.cat([kv.value_pool[self._places].float(), own_values])
        # Heads first in memory, too: as strides, they would take twice as long to multiply.
        return keys.transpose(0, 1).contiguous(), values.transpose(0, 1).contiguous()

    def add(self, row: "ProbingRow", first: int, paid: Tensor) -> None:
        """Add the attention ``[tokens, context]`` of a row's tokens from its ``first`` on."""
        first += row.own.start
        paid = paid[max(0, row.counted - first) :]
        for question in self.questions:
            question.add(max(first, row.counted), paid)


class ProbingRow(NamedTuple):
    """The ``tokens`` of a step that belong to one probe, ``own`` of its own; those before ``counted`` were measured.

    ``hidden`` ``[tokens, own tokens]`` has the own tokens that they don't see. ``turns`` moves them to their place.
    """

    probe: _Running
    tokens: slice
    own: slice
    counted: int
    hidden: Tensor
    turns: Rotations


class Probes:
    """The probes of one worker, which measure in its layers ``measured``, and compute in these ``layers``."""

    def __init__(self, layers: Mapping[str, LayerKV], measured: frozenset[str]) -> None:
        self._layers = layers
        self._page_tokens = next(iter(layers.values())).key_pool.shape[1]
        self._measured_layers = measured
        self._running: dict[str, _Running] = {}
        self._measured: dict[int, list[_Question]] = {}
        """By the probes' numbers, until they are taken: a probe answers before this worker learns of its end."""

    def update(self, started: Mapping[str, TransferPlan], ended: Iterable[str]) -> None:
        """Take in new probes, and forget ended ones."""
        for request_id in ended:
            self._running.pop(request_id, None)
        for request_id, plan in started.items():
            if plan.probe is not None:
                self._running[request_id] = probe = _Running(plan, self._page_tokens)
                self._measured[plan.probe] = probe.questions

    @property
    def is_idle(self) -> bool:
        """Whether no probe is under way."""
        return not self._running

    def step(self, rows: Sequence[BatchRow]) -> list[ProbingRow]:
        """The rows of probes in a step."""
        return [
            probe.row(slice(row.first, row.first + row.num_tokens), row.length - probe.num_context)
            for row in rows
            if (probe := self._running.get(row.request_id)) is not None
        ]

    def attend(
        self,
        layer: str,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        rows: Iterable[ProbingRow],
        scale: float,
    ) -> None:
        """Compute a layer's attention of these rows, of ``[tokens, heads, D]`` each, and add what is measured."""
        kv = self._layers.get(layer)
        for row in rows:
            if kv is None:
                output[row.tokens] = 0
                continue
            queries = row.turns.apply(query[row.tokens], kv.frequencies).float() * scale
            keys, values = row.probe.read(layer, kv, row, key[row.tokens], value[row.tokens])
            # So few tokens at a time that their logits take some 64 MiB.
            step = max(1, _MOST_LOGITS // (query.shape[1] * keys.shape[1]))
            for first in range(0, len(queries), step):
                part = slice(first, first + step)
                with _products_of(query.dtype):
                    weights, result = _attention(queries[part], keys, values, row.hidden[part])
                output[row.tokens][part] = result
                if layer in self._measured_layers:
                    # One dimension at a time: ten times as fast as torch's mean over both.
                    context = weights[..., : row.probe.num_context]
                    row.probe.add(row, first, context.sum(2).sum(0) / query.shape[1])

    def take(self, probe: int) -> list[Measured]:
        """Return a probe's measurements, of each question, once; none if it did not run."""
        return [question.sums() for question in self._measured.pop(probe, ())]


def _attention(query: Tensor, keys: Tensor, values: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Weights ``[KV heads, tokens, heads of each, keys]`` and results ``[tokens, heads, D]`` of scaled queries.

    ``hidden`` ``[tokens, last keys]`` are the keys that a token doesn't see.
    """
    grouped = query.reshape(len(query), len(keys), -1, query.shape[2]).transpose(0, 1)
    # One product for each KV head: with a dimension for tokens, torch would copy the keys for each of them.
    weights = torch.bmm(grouped.flatten(1, 2), keys.transpose(1, 2))
    by_token = weights.view(*grouped.shape[:3], -1)
    by_token[..., -hidden.shape[1] :].masked_fill_(hidden[:, None], -torch.inf)
    torch.softmax(weights, -1, out=weights)
    result = torch.bmm(weights, values).view(*grouped.shape[:3], -1)
    return by_token, result.transpose(0, 1).flatten(1, 2)


@contextmanager
def _products_of(dtype: torch.dtype) -> Iterator[None]:
    """Multiply float32 matrices as if they were of the model's ``dtype``, with sums in float32."""
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = matmul.fp32_precision
    if dtype == torch.bfloat16:
        matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before
