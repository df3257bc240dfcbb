# SPDX-License-Identifier: Apache-2.0
"""The attention that a request's tokens pay to each token of its context, in a few layers.

A *probe* is a request that attends to its context in the pool and computes questions behind it, each as if it were
alone. Their queries meet the keys of the context where these are read, so what is measured is the model's own attention
over the composed context.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import torch
from torch import Tensor

from engine_ext.core.attention.rows import BatchRow
from engine_ext.core.pages import tokens_of
from engine_ext.wire.plan import TransferPlan
from kernels.paged import LayerKV
from kernels.rope import AngleTables, rotate_keys

_MOST_LOGITS: Final = 1 << 24
Measured = tuple[int, list[float], bytes]
"""Of one question: rows, each of one token in one layer; their sum of attention to each token of the context; and, of
its tokens from the plan's ``probed_from`` on, the sum over layers of that to each span, float32 ``[tokens, spans]``."""


@dataclass(slots=True)
class _Running:
    """A question of a probe under way: its sums so far, and its own keys by layer.

    Its tokens are ``[first, end)`` of the request. ``weights`` are sums over ``num_rows`` rows, each one token in one
    layer. ``by_token`` ``[own tokens, spans]`` has each token's sum over layers, if the plan asks for some.
    """

    plan: TransferPlan
    first: int
    end: int
    turns: AngleTables
    weights: Tensor
    by_token: Tensor
    num_rows: int = 0
    own: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def all_of(cls, plan: TransferPlan) -> "list[_Running]":
        """The questions of a probe, in order."""
        questions, first = [], plan.num_loaded_tokens
        for window in plan.windows:
            # The question's tokens are so many positions behind their place; the context's keys move along with them.
            shift = first - window.position
            turns = AngleTables(torch.tensor([-span.delta - shift for span in plan.loads]))
            weights, by_token = torch.zeros(plan.num_loaded_tokens), torch.zeros(0, len(plan.loads))
            questions.append(cls(plan, first, first + window.length, turns, weights, by_token))
            first += window.length
        return questions

    def add(self, layer: str, kv: LayerKV, query: Tensor, key: Tensor, scale: float) -> None:
        """Add the attention of new tokens, float32 ``query`` ``[tokens, heads, D]``, ``key`` ``[tokens, heads, D]``."""
        earlier = self.own.get(layer, key[:0])
        own = self.own[layer] = torch.cat([earlier, key])
        cos, sin = self.turns.of(kv.frequencies)
        query = query * scale  # and not the logits, which are many
        # Filled in place: each copy of the logits would take as long as the products.
        logits = torch.empty(own.shape[1], query.shape[1] // own.shape[1] * len(query), len(self.weights) + len(own))
        first = 0
        for i, span in enumerate(self.plan.loads):
            turned = rotate_keys(query, cos[i : i + 1], sin[i : i + 1], kv.frequencies.is_neox)
            keys = tokens_of(kv.key_pool, span.pages, span.skipped + span.length)[span.skipped :]
            _products(turned, keys, logits[..., first : first + span.length])
            first += span.length
        _products(query, own, logits[..., first:])
        by_head = logits.view(len(logits), len(query), -1, logits.shape[2])
        seen = torch.arange(len(own)) <= len(earlier) + torch.arange(len(query))[:, None]
        by_head[..., first:].masked_fill_(~seen[:, None], -torch.inf)
        # One dimension at a time: ten times as fast as torch's mean over both.
        paid = by_head.softmax(-1).sum(2).sum(0)[:, :first] / query.shape[1]
        self.weights += paid.sum(0)
        self.num_rows += len(query)
        if self.plan.probed_from is not None:
            self._keep_by_token(len(earlier), paid)

    def _keep_by_token(self, first: int, paid: Tensor) -> None:
        """Add the attention ``[tokens, context]`` of own tokens from ``first`` on."""
        end, spans = first + len(paid), self.plan.loads
        missing = max(0, end - len(self.by_token))
        self.by_token = torch.cat([self.by_token, self.by_token.new_zeros(missing, len(spans))])
        span_of = torch.repeat_interleave(torch.tensor([span.length for span in spans]))
        self.by_token[first:end].index_add_(1, span_of, paid)

    def sums(self) -> Measured:
        """The measurements so far."""
        kept = self.by_token[self.plan.probed_from or 0 :]
        return self.num_rows, self.weights.tolist(), kept.numpy().tobytes()


class ProbingRow(NamedTuple):
    """Tokens ``[first, end)`` of a step, which belong to one question and have not been measured yet."""

    running: _Running
    first: int
    end: int


class Probes:
    """The probes of one worker, which measure in its ``layers``.

    ``request_ids`` returns the requests of a step's rows, in order.
    """

    def __init__(self, layers: Mapping[str, LayerKV], request_ids: Callable[[], Sequence[str]]) -> None:
        self._layers = layers
        self._request_ids = request_ids
        self._running: dict[str, list[_Running]] = {}
        self._num_seen: dict[str, int] = {}
        self._measured: dict[int, list[_Running]] = {}
        """By the probes' numbers, until they are taken: a probe answers before this worker learns of its end."""

    def update(self, started: Mapping[str, TransferPlan], ended: Iterable[str]) -> None:
        """Take in new probes, and forget ended ones."""
        for request_id in ended:
            self._running.pop(request_id, None)
            self._num_seen.pop(request_id, None)
        for request_id, plan in started.items():
            if plan.probe is not None:
                self._running[request_id] = self._measured[plan.probe] = _Running.all_of(plan)
                self._num_seen[request_id] = plan.num_loaded_tokens

    @property
    def is_idle(self) -> bool:
        """Whether no probe is under way."""
        return not self._running

    def step(self, rows: Sequence[BatchRow]) -> list[ProbingRow]:
        """The tokens of a step that count, each token of a probe once."""
        found = []
        for request_id, row in zip(self._request_ids(), rows, strict=False):
            if request_id not in self._running or row.length <= (seen := self._num_seen[request_id]):
                continue
            self._num_seen[request_id] = row.length
            begin = row.length - row.num_tokens
            for question in self._running[request_id]:
                first, end = max(question.first, begin, seen), min(question.end, row.length)
                if first < end:
                    found.append(ProbingRow(question, row.first + first - begin, row.first + end - begin))
        return found

    def measure(self, layer: str, query: Tensor, key: Tensor, rows: Iterable[ProbingRow], scale: float) -> None:
        """Add a layer's attention from these rows of ``query`` and ``key``, each ``[tokens, heads, D]``."""
        if (kv := self._layers.get(layer)) is None:
            return
        for running, first, end in rows:
            # So few tokens at a time that their logits take some 64 MiB.
            step = max(1, _MOST_LOGITS // (query.shape[1] * (len(running.weights) + end - first)))
            for start in range(first, end, step):
                part = slice(start, min(start + step, end))
                running.add(layer, kv, query[part].float(), key[part].float(), scale)

    def take(self, probe: int) -> list[Measured]:
        """Return a probe's measurements, of each question, once; none if it did not run."""
        return [question.sums() for question in self._measured.pop(probe, ())]


def _products(query: Tensor, keys: Tensor, logits: Tensor) -> None:
    """Set ``logits`` ``[KV heads, tokens * heads of each, keys]`` of ``query`` ``[tokens, heads, D]``."""
    grouped = query.reshape(len(query), keys.shape[1], -1, query.shape[2]).transpose(0, 1)
    # One product for each KV head: with a dimension for tokens, torch would copy the keys for each of them.
    torch.bmm(grouped.flatten(1, 2), keys.float().permute(1, 2, 0), out=logits)
