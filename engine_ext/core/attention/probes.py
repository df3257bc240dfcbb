# SPDX-License-Identifier: Apache-2.0
"""Scores of segments by the attention that a probe's tokens pay them.

A *probe* is a request of the question alone. Its queries, turned to each segment's distance, meet the
representations of the segments' keys in a few layers; so chunks are scored before any of them is loaded.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from engine_ext.core.attention.rows import BatchRow
from engine_ext.core.pages import PageTags, tokens_of
from engine_ext.wire.plan import Probe, TransferPlan
from kernels.paged import LayerKV
from kernels.rope import AngleTables, rotate_keys
from kernels.selection import Representation, SelectionPolicy, shares


@dataclass(slots=True)
class _Running:
    """A probe under way: its segments by layer, the rotations of its queries, its sums over ``num_seen`` tokens."""

    kept: list[dict[str, Representation]]
    turns: AngleTables
    scores: Tensor
    num_seen: int

    @classmethod
    def of(cls, probe: Probe, kept: list[dict[str, Representation]]) -> "_Running":
        turns = torch.tensor([-delta for _, delta in probe.segments])
        return cls(kept, AngleTables(turns), torch.zeros(len(kept)), probe.first_token)


class ProbingRow(NamedTuple):
    """Tokens ``[first, end)`` of a step, which score a probe's segments."""

    running: _Running
    first: int
    end: int


class Probes:
    """The probes of one worker, and representations of segments in its ``layers``.

    ``tags`` are those of the pool's pages; ``request_ids`` returns the requests of a step's rows, in order.
    """

    def __init__(
        self,
        layers: Mapping[str, LayerKV],
        tags: PageTags,
        policy: SelectionPolicy,
        request_ids: Callable[[], Sequence[str]],
    ) -> None:
        self._layers = layers
        self._tags = tags
        self._policy = policy
        self._request_ids = request_ids
        self._kept: dict[int, dict[str, Representation]] = {}
        self._running: dict[str, _Running] = {}
        self._scores: dict[int, Tensor] = {}
        """Scores by probes' ids, until they are taken: a probe answers before this worker learns of its end."""

    def represent(self, number: int, pages: Sequence[int], tag: int, num_tokens: int) -> int:
        """Keeps a representation of the segment in ``pages`` as ``number``; returns its bytes.

        Raises :class:`WrongPagesError`.
        """
        self._tags.check(pages, tag)
        kept = {
            name: self._policy.represent(tokens_of(kv.key_pool, pages, num_tokens)) for name, kv in self._layers.items()
        }
        self._tags.check(pages, tag)  # a writer removes them first
        self._kept[number] = kept
        return sum(tensor.nbytes for layer in kept.values() for tensor in layer.values())

    def forget(self, numbers: Iterable[int]) -> None:
        """Drops the representations of these segments."""
        for number in numbers:
            self._kept.pop(number, None)

    def update(self, started: Mapping[str, TransferPlan], ended: Iterable[str]) -> None:
        """Takes in new probes, and forgets ended ones."""
        for request_id in ended:
            self._running.pop(request_id, None)
        for request_id, plan in started.items():
            if (probe := plan.probe) is not None and all(number in self._kept for number, _ in probe.segments):
                running = _Running.of(probe, [self._kept[number] for number, _ in probe.segments])
                self._running[request_id], self._scores[probe.id] = running, running.scores

    @property
    def is_idle(self) -> bool:
        """Whether no probe is under way."""
        return not self._running

    def step(self, rows: Sequence[BatchRow]) -> list[ProbingRow]:
        """The tokens of a step that score segments, each token of a probe once."""
        found = []
        for request_id, row in zip(self._request_ids(), rows, strict=False):
            running = self._running.get(request_id)
            if running is None or row.length <= running.num_seen:
                continue
            new = min(row.num_tokens, row.length - running.num_seen)
            running.num_seen = row.length
            found.append(ProbingRow(running, row.first + row.num_tokens - new, row.first + row.num_tokens))
        return found

    def score(self, layer: str, query: Tensor, rows: Iterable[ProbingRow], scale: float) -> None:
        """Adds a layer's attention from these rows of ``query`` ``[tokens, heads, D]``."""
        if (kv := self._layers.get(layer)) is None:
            return
        for running, first, end in rows:
            cos, sin = running.turns.of(kv.frequencies)
            queries = [
                rotate_keys(query[first:end], cos[i : i + 1], sin[i : i + 1], kv.frequencies.is_neox)
                for i in range(len(cos))
            ]
            running.scores += shares(self._policy, queries, [each[layer] for each in running.kept], scale)

    def take(self, probe: int) -> list[float] | None:
        """The scores of a probe that has answered, once; ``None`` if a segment of it was unknown."""
        scores = self._scores.pop(probe, None)
        return None if scores is None else scores.tolist()
