# SPDX-License-Identifier: Apache-2.0
"""The report of one request, with its metrics, its record in the log, and its trace."""

import itertools
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vllm.outputs import RequestOutput

from cache.errors import FullAttentionError
from cache.lease import ChunkStatus
from cache.metrics import ChunkCacheMetrics
from cache.report import Citation, Decided, Handed, Report, ReportedChunk, Segment, explain_segments
from cache.segments.index import ChunkKVCache
from cache.sparse import shares
from engine_ext.chunks.chunk_cache import FillResult
from engine_ext.chunks.source import SourceResult
from engine_ext.client.call import Stages
from engine_ext.client.recompute import Recomputed
from engine_ext.client.request import ResolvedRequest, Ticket
from engine_ext.client.reread import Reread
from engine_ext.client.segments import FilledSegments
from engine_ext.client.sparse import Selection
from engine_ext.client.tracing import TraceSpan
from engine_ext.wire.plan import LOST_KEY

logger = logging.getLogger(__name__)


class Reporter:
    """Writes the report of one request as it proceeds."""

    def __init__(
        self,
        request: ResolvedRequest,
        num_prompt_tokens: int,
        stages: Stages,
        metrics: ChunkCacheMetrics,
        ticket: Ticket,
    ) -> None:
        options = request.options
        chosen = options.decision
        self.report = Report.begun(
            options.position_strategy,
            options.scope,
            num_prompt_tokens,
            request.prompt.chunks if request.prompt else (),
            Decided(mode=chosen.mode, why=chosen.why) if chosen else None,
            stages.timings_ms,
        )
        if ticket.retrieved is not None:
            self.report.retrieved, self.report.retrieval_degraded = ticket.retrieved
        self.report.found = list(ticket.found) or None
        self._request = request
        self._stages = stages
        self._metrics = metrics
        self._origins: Mapping[ChunkKVCache, SourceResult] = {}
        self._num_computed = self._num_computed_of_saved = 0

    def selected(self, selection: Selection) -> None:
        """Describes the chunks that a sparse request keeps, and counts the tokens computed to choose them."""
        report, kept = self.report, selection.kept
        if kept is None:
            return
        self.measured(selection.attention)
        for index, chunk in zip(self._request.whole().documents, report.chunks, strict=True):
            chunk.kept = index in kept
        self._num_computed += sum(result.num_computed for result in selection.fills)
        self._origins = selection.origins

    def measured(self, attention: Sequence[Sequence[float]]) -> None:
        """Describes the question's attention to each chunk."""
        paid = [sum(attention[index]) for index in self._request.whole().documents]
        for chunk, share in zip(self.report.chunks, shares(paid), strict=True):
            chunk.share = share

    def computed(self, results: Iterable[FillResult]) -> None:
        """Counts tokens computed in the request's own requests for KV."""
        for result in results:
            self._num_computed += result.num_computed
            self._num_computed_of_saved += result.num_computed_of_saved

    def chunked(self, segments: FilledSegments, fresh: Recomputed | None) -> None:
        """Describes an answer over cached chunks, with ``fresh`` windows in them."""
        report, options, layout = self.report, self._request.options, segments.placed.layout
        report.mode = "chunked"
        report.placement = None if layout.placement == "copy" else layout.placement
        report.adapter = None if self._request.scope.adapter else segments.cache.config.adapter or None
        report.kv = "requantized" if layout.is_requantized else None
        tokens, sparse = report.tokens, options.sparse
        tokens.left_out = layout.num_left_out
        report.budget_share = sparse.budget_share if sparse else 1
        report.recompute, report.reread = options.recompute, options.reread
        if options.explain:
            prompt, whole = self._request.chunked(), self._request.layout(segments.cache.reindexer)
            report.segments, report.opening = explain_segments(prompt, whole), prompt.opening
        origins = {**self._origins, **segments.sources()}
        kept = (chunk for chunk in report.chunks if chunk.kept)
        unused = dict[ChunkKVCache, int]()
        for chunk, segment in zip(segments.placed.request.chunked().chunks, segments.lease.chunks, strict=True):
            entry = segment.entry
            status, origin, why = origins.get(entry, (segment.status, None, None))
            all_windows = fresh.windows if fresh is not None else ()
            windows = [each for each in all_windows if 0 <= each.start - segment.start < segment.length]
            num_tokens = sum(each.length for each in windows)
            self._num_computed += num_tokens
            if status is ChunkStatus.FILLED:
                unused[entry] = entry.num_tokens - segment.length
            else:  # if it was filled, they are counted as the chunk's
                self._num_computed_of_saved += num_tokens
            if chunk.is_text:
                report.text_between = "computed" if windows else "as chunks"
                continue
            shown = next(kept)
            shown.key, shown.status, shown.origin, shown.why = str(entry.key), status, origin, why
            shown.recomputed = [(each.start - segment.start, each.end - segment.start) for each in windows]
        self._num_computed_of_saved -= sum(unused.values())
        # Segments that were computed to be chosen from: reused from the pool, but not from before this request.
        self._num_computed_of_saved += sum(
            entry.num_tokens
            for entry in {segment.entry for segment in segments.lease.segments}
            if entry in self._origins and self._origins[entry].status is ChunkStatus.FILLED
        )

    def reread(self, again: Reread) -> None:
        """Describes the documents that the prompt has once more, numbered among those that are kept."""
        kept = [chunk for chunk in self.report.chunks if chunk.kept]
        for number in again.documents:
            kept[number].reread = True
        tokens, segments = self.report.tokens, self.report.segments
        tokens.reread = sum(map(len, again.token_ids))
        tokens.prompt += tokens.reread
        if segments:
            question = segments.pop()
            for token_ids in again.token_ids:
                segments.append(Segment(kind="reread", token_ids=token_ids, position=question.position))
                question.position += len(token_ids)
            segments.append(question)

    def full(self, why: FullAttentionError) -> None:
        """Describes an answer in full attention instead."""
        report, prompt, options = self.report, self._request.prompt, self._request.options
        report.mode, report.reason = "full", str(why)
        report.placement = report.adapter = report.kv = report.opening = report.text_between = None
        report.budget_share, report.recompute, report.reread = 1, 0, 0
        report.tokens.prompt -= report.tokens.reread
        report.tokens.left_out = report.tokens.reread = 0
        report.chunks = ReportedChunk.all_of(prompt.chunks) if prompt is not None else []
        if prompt is not None and options.explain:
            report.segments = explain_segments(prompt, None)
        self.uncited("in full attention, chunks aren't told apart")
        self._metrics.full_reasons[why.kind] += 1

    def cited(self, citations: list[Citation]) -> None:
        """Describes what the sentences of the answer rest on; chunks are numbered among those that are kept."""
        kept = [index for index, chunk in enumerate(self.report.chunks) if chunk.kept]
        for cited in itertools.chain.from_iterable(each.chunks for each in citations):
            cited.chunk = kept[cited.chunk]
        self.report.citations = citations

    def uncited(self, why: str) -> None:
        """Notes why there are no citations, if they were asked for."""
        if self._request.options.cite:
            self.report.uncited = why

    def handed_over(self, other: Report) -> None:
        """Describes an answer over another engine's blocks by that engine's report."""
        self.report = other.model_copy(update={"handover": Handed(outcome="taken")})
        self.report.timings_ms = self._stages.timings_ms  # the same dictionary: it grows
        self.uncited("another engine read the chunks")

    def not_handed_over(self, handed: Handed) -> None:
        """Notes why another engine's blocks are not used."""
        self.report.handover = handed

    def note(self, output: RequestOutput) -> None:
        """Records the output's times; its cached tokens, which usage tells, become the reused ones."""
        timings = self.report.timings_ms
        timings.setdefault("first_token", self._stages.elapsed_ms())
        if output.finished:
            timings.update(_engine_timings_ms(output))
            timings["total"] = self._stages.elapsed_ms()
        if self.report.mode == "chunked" and not self._is_handed_over and output.num_cached_tokens:
            output.num_cached_tokens -= self._num_computed_of_saved

    def finish(self, output: RequestOutput, request_id: str, span: TraceSpan | None) -> dict[str, Any]:
        """Counts tokens, logs and traces the report, and attaches its JSON, which it returns, to the last output."""
        self._count(output)
        report = self.report.to_dict()
        if span is not None:
            span.describe({"request_id": request_id, **_summary(report)})
        log_finished(request_id, report)
        output.kv_transfer_params = {**(output.kv_transfer_params or {}), "cache": report}
        return report

    @property
    def _is_handed_over(self) -> bool:
        handover = self.report.handover
        return handover is not None and handover.outcome == "taken"

    def _count(self, output: RequestOutput) -> None:
        tokens, metrics, handover = self.report.tokens, self._metrics, self.report.handover
        metrics.requests[self.report.mode] += 1
        if handover is not None and self._is_handed_over:  # the other engine has counted its tokens
            if LOST_KEY in (output.kv_transfer_params or {}):
                handover.outcome, handover.why = "lost", "computed again in full attention: its blocks were needed"
                metrics.handovers["lost"] += 1
            return
        tokens.reused = output.num_cached_tokens or 0
        tokens.computed = tokens.prompt - tokens.left_out - tokens.reused
        tokens.fill_computed = self._num_computed
        metrics.tokens.update(
            reused=tokens.reused,
            computed=tokens.computed,
            fill_computed=tokens.fill_computed,
            left_out=tokens.left_out,
        )


def _engine_timings_ms(output: RequestOutput) -> dict[str, Any]:
    """vLLM's own times: in its queue, and until the first token."""
    metrics = output.metrics
    if metrics is None or not metrics.queued_ts:
        return {"queue": 0.0}
    return {
        "queue": (metrics.scheduled_ts - metrics.queued_ts) * 1e3,
        "first_token": metrics.first_token_latency * 1e3,
    }


def log_finished(request_id: str, report: Mapping[str, Any]) -> None:
    """Logs a readable line at level INFO, with its parts as fields of the record."""
    if not logger.isEnabledFor(logging.INFO):
        return
    fields = _summary(report)
    logger.info("request %s: %s", request_id, _line(fields), extra={"request_id": request_id, **fields})


def _summary(report: Mapping[str, Any]) -> dict[str, Any]:
    """The report without its chunks, which are counted by status."""
    chunks = report["chunks"]
    statuses = Counter(chunk["status"] for chunk in chunks if chunk["status"] is not None)
    named = {name: report[name] for name in ("mode", "reason", "tokens", "timings_ms")}
    return {**named, "chunks": {"total": len(chunks), **statuses}}


def _line(fields: Mapping[str, Any]) -> str:
    mode = fields["mode"] if fields["reason"] is None else f"{fields['mode']} ({fields['reason']})"
    chunks = ", ".join(f"{count} {name}" for name, count in fields["chunks"].items() if name != "total")
    tokens, timings = fields["tokens"], fields["timings_ms"]
    return "; ".join(
        [
            f"{mode}, {fields['chunks']['total']} chunks" + (f": {chunks}" if chunks else ""),
            f"{tokens['reused']} of {tokens['prompt']} tokens reused",
            ", ".join(f"{name.replace('_', ' ')} {value:.1f} ms" for name, value in timings.items()),
        ]
    )
