# SPDX-License-Identifier: Apache-2.0
"""Plans of loads and saves, between the app and the engine.

A :class:`TransferPlan` travels inside a request's ``kv_transfer_params``, as plain dicts, lists and integers. A
:class:`StepTransfers` travels from the connector's scheduler half to its worker half, once per step, and a
:class:`LoadRefused` back.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Final

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from cache.lease import FillJob, Lease, LeasedSegment
from cache.segments.index import ChunkKVCache
from cache.windows import Window

PARAMS_KEY = "tessera"
"""Key of the plan in ``kv_transfer_params``."""
SAVED_KEY: Final = "saved"
"""Key in a finished request's ``kv_transfer_params``: its saves were carried out."""
LOST_KEY: Final = "lost"
"""Likewise: KV from elsewhere was computed again (:class:`Elsewhere`)."""


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens ``[start, start + length)`` of a request, and their pages.

    ``skipped`` other tokens precede them on the pages. On loads K is rotated by ``delta`` positions. ``tag`` is the
    pages' tag, required (load) or to be set (save).
    """

    start: int
    length: int
    delta: int
    tag: int
    pages: tuple[int, ...]
    skipped: int = 0

    @property
    def end(self) -> int:
        """One past the last token."""
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class Composition:
    """Segments that fill whole blocks of the engine, which all requests with these segments share.

    ``lengths`` has the lengths of the system segment and of the chunks behind it. ``salt`` is the salt of plain
    requests with the same system segment.
    """

    lengths: tuple[int, ...]
    salt: str | None


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Composed KV that another connector reads from another engine, once.

    If the engine gives up its blocks (a preemption), the request is computed in full attention, under ``salt``.
    """

    salt: str | None


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """Spans to load before, and to save after, a request's prefill.

    ``loads`` are contiguous from token 0, so their end is the number of tokens the engine needn't compute. With a
    ``composition``, only tokens without a block in the engine are loaded. A request that ``attends`` reads its segments
    in the pool, and loads none; KV ``elsewhere`` is nobody's to load. Its own tokens may be ``windows`` of another
    sequence, one after another, each seeing what precedes it there: ``loads`` then have gaps, at the windows, unless
    all stand at the end. The attention of each window to the segments may be kept under the number ``probe``, that of
    each token too from the windows' token ``probed_from`` on.
    """

    loads: tuple[Span, ...] = ()
    saves: tuple[Span, ...] = ()
    composition: Composition | None = None
    attends: bool = False
    elsewhere: Elsewhere | None = None
    probe: int | None = None
    probed_from: int | None = None
    windows: tuple[Window, ...] = ()

    @property
    def num_loaded_tokens(self) -> int:
        """Tokens before the request's own."""
        if self.windows:
            return self.windows[0].start
        return self.loads[-1].end if self.loads else 0

    def to_params(self) -> dict[str, Any]:
        """The plan as ``kv_transfer_params``."""
        return {PARAMS_KEY: msgspec.to_builtins(self)}

    @classmethod
    def from_params(cls, params: dict[str, Any] | None) -> "TransferPlan | None":
        """The plan in ``kv_transfer_params``, or ``None`` if there is none."""
        fields = (params or {}).get(PARAMS_KEY)
        return None if fields is None else msgspec.convert(fields, cls)

    @classmethod
    def for_answer(
        cls,
        lease: Lease,
        fresh: Sequence[LeasedSegment] = (),
        composition: Composition | None = None,
        *,
        attends: bool = False,
    ) -> "TransferPlan":
        """Loads every leased segment to its place in the layout; ``fresh`` windows take the place of its tokens."""
        spans = [*_around(lease.segments, fresh), *map(_placed, fresh)]
        loads = tuple(sorted(spans, key=lambda span: span.start))
        return cls(loads=loads, composition=composition, attends=attends)

    @classmethod
    def for_windows(cls, lease: Lease, fresh: Sequence[LeasedSegment], windows: Sequence[Window]) -> "TransferPlan":
        """Computes ``windows`` of the lease's sequence and saves them as ``fresh``."""
        starts = accumulate((window.length for window in windows), initial=windows[0].start)
        saves = tuple(replace(_placed(each), start=start, delta=0) for each, start in zip(fresh, starts, strict=False))
        return cls(tuple(_around(lease.segments, fresh)), saves, attends=True, windows=tuple(windows))

    def for_probe(self, probe: int, questions: Sequence[int], probed_from: int | None) -> "TransferPlan":
        """Measures the attention of ``questions`` of these lengths, each asked right behind the loads."""
        end = self.num_loaded_tokens
        windows = tuple(Window(end, length, end) for length in questions)
        return replace(self, attends=True, probe=probe, probed_from=probed_from, windows=windows)

    @classmethod
    def for_fill(cls, job: FillJob, prefix: ChunkKVCache | None) -> "TransferPlan":
        """Saves the job's entries from a request whose prompt is ``job.prompt_ids``; loads ``prefix``, if given."""
        return cls(tuple(map(_span, [prefix] if prefix else [])), tuple(map(_span, job.entries)))


def of_others(params: dict[str, Any] | None) -> dict[str, Any] | None:
    """``kv_transfer_params`` without the plan; ``None`` if nothing is left."""
    return {name: value for name, value in (params or {}).items() if name != PARAMS_KEY} or None


@dataclass(frozen=True, slots=True)
class BlockTransfer:
    """One request's spans together with the engine blocks that hold its tokens, in token order.

    Only tokens ``[first_token, end_token)`` of the spans are moved: earlier ones are in the blocks already, or behind a
    window; later ones are computed in later steps. The blocks are those of one ``table``, a KV cache group of vLLM's:
    layers with windows have tables of their own.
    """

    request_id: str
    block_ids: tuple[int, ...]
    first_token: int
    spans: tuple[Span, ...]
    table: int = 0
    end_token: int | None = None

    def end_of(self, span: Span) -> int:
        """One past the last token of ``span`` that is moved."""
        return span.end if self.end_token is None else min(span.end, self.end_token)


@dataclass
class StepTransfers(KVConnectorMetadata):
    """All work of one step: ``loads`` before the forward pass, ``saves`` after it.

    ``attending`` has the plans of requests that attend to the pool or probe it from this step on, ``ended`` those that
    no longer do.
    """

    attending: dict[str, TransferPlan] = field(default_factory=dict)
    ended: list[str] = field(default_factory=list)
    loads: list[BlockTransfer] = field(default_factory=list)
    saves: list[BlockTransfer] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class LoadRefused(KVConnectorWorkerMetadata):
    """A worker's word that it refused loads of this step."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "LoadRefused":
        """Several workers' word is one."""
        return self


def _placed(segment: LeasedSegment, skipped: int = 0, end: int | None = None) -> Span:
    """A segment at its place in the layout, without its first tokens, up to index ``end`` of the sequence."""
    at, entry = segment.place, segment.entry
    start = at.start + skipped
    length = (at.start + at.length if end is None else end) - start
    return Span(start, length, at.delta, entry.tag, tuple(entry.pages), skipped)


def _around(segments: Sequence[LeasedSegment], windows: Sequence[LeasedSegment]) -> list[Span]:
    """The segments at their places, without the tokens of the windows, which are in the order of the sequence."""
    spans = []
    for segment in segments:
        start, end = segment.start, segment.start + segment.length
        for window in windows:
            if start <= window.start < end:
                spans.append(_placed(segment, start - segment.start, window.start))
                start = window.start + window.length
        spans.append(_placed(segment, start - segment.start, end))
    return [span for span in spans if span.length]


def _span(entry: ChunkKVCache) -> Span:
    """A segment at its computed position."""
    identity = entry.identity
    return Span(identity.num_prefix_tokens, identity.num_tokens, 0, entry.tag, tuple(entry.pages))
