# SPDX-License-Identifier: Apache-2.0
"""One request with chunks, from plan to report."""

import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any

from vllm.exceptions import VLLMValidationError
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams

from cache.holdings import DocumentKey
from cache.index import ChunkKVCache
from cache.layout import Layout
from cache.lease import ChunkStatus, Lease
from cache.manager import Removal
from cache.report import Decided, Links, Report, explain_segments
from engine_ext.chunks.fills import FillError, FillResult
from engine_ext.chunks.links import Linker, LinkError, borrow_links, link_placements
from engine_ext.client.comparison import Comparison
from engine_ext.client.request_log import log_finished, summary
from engine_ext.client.tracing import Span, start_request
from engine_ext.wire.plan import Composition, TransferPlan
from engine_ext.wire.request import ChunkedRequest, FullAttentionError, Outputs, cache_scope

if TYPE_CHECKING:
    from engine_ext.client.engine import ChunkEngine

logger = logging.getLogger(__name__)

FILL_ATTEMPTS = 2


class ChunkCacheUnavailableError(VLLMValidationError):
    """``cache.mode = "chunked"`` was asked for and can't be given; the message says why. Nothing was run."""


class ChunkedRun:
    """One request with chunks, from plan to report."""

    def __init__(
        self,
        engine: "ChunkEngine",
        request: ChunkedRequest,
        prompt: dict[str, Any],
        params: SamplingParams,
        request_id: str,
        kwargs: dict[str, Any],
    ) -> None:
        self.engine = engine
        self.ticket = request.ticket
        self.chunked_prompt = request.prompt
        self.prompt = prompt
        self.params = params
        self.request_id = request_id
        headers, arrived = kwargs.get("trace_headers"), prompt.get("arrival_time")
        self.span = start_request(headers, arrived, enabled=engine.is_traced)
        self.kwargs = {**kwargs, "trace_headers": self.span.headers}
        adapter = engine.adapters.name(kwargs.get("lora_request"))
        self.options = request.options(adapter)
        self.scope = cache_scope(self.options, prompt.get("cache_salt"), adapter)
        self.started = time.perf_counter()
        self.report = self._new_report()
        self.filled: list[FillResult] = []
        self.linked: list[FillResult] = []

    async def outputs(self) -> Outputs:
        """The request's outputs; the last one carries the report."""
        with self.span:
            try:
                async with self._context() as context, aclosing(self._run_chunked(*context)) as chunked:
                    async for output in chunked:
                        yield output
                return
            except FullAttentionError as error:
                fallback = error
            async with aclosing(self._run_full(fallback)) as full:
                async for output in full:
                    yield output

    @asynccontextmanager
    async def _context(self) -> AsyncIterator[tuple[TransferPlan, Lease, str]]:
        """What the answer is to load, the lease on its segments meanwhile, and the salt of what they compose.

        Raises :class:`FullAttentionError`.
        """
        lease, layout = await self._filled_lease()
        try:
            links = await self._link(lease, layout)
            try:
                yield self._answer_plan(lease, links, layout), lease, self._layout_salt(layout)
            finally:
                if links is not None:
                    self.engine.release(links)
        finally:
            self.engine.release(lease)

    async def _filled_lease(self) -> tuple[Lease, Layout]:
        """A lease on segments that can all be loaded, and their layout; raises :class:`FullAttentionError`.

        If a fill fails, whoever waited for it and comes first starts it once more.
        """
        for attempt in range(1, FILL_ATTEMPTS + 1):
            lease, layout = self._plan()
            try:
                self.filled = await self._fill(lease)
                return lease, layout
            except BaseException as error:
                self.engine.release(lease)
                if not isinstance(error, FillError) or attempt == FILL_ATTEMPTS:
                    raise
        raise AssertionError("unreachable")

    def _plan(self) -> tuple[Lease, Layout]:
        """A lease on the segments and their layout; raises :class:`FullAttentionError` if they shan't be reused."""
        if self.chunked_prompt is None:
            raise FullAttentionError("no chunks", "the request has no chunks")
        self._refuse_what_needs_full_attention()
        layout = self.engine.layout(self.chunked_prompt, self.options.position_strategy)
        if self.options.explain:
            self.report.segments = explain_segments(self.chunked_prompt, layout)
            self.report.opening = self.chunked_prompt.opening
        started = time.perf_counter()
        with self.span.child("tessera.plan"):
            lease = self.engine.acquire(self.chunked_prompt, layout, self.scope)
        self.report.timings_ms["plan"] = (time.perf_counter() - started) * 1e3
        return lease, layout

    def _refuse_what_needs_full_attention(self) -> None:
        if why := self.options.why_full:
            raise FullAttentionError("profile" if self.options.decision else "asked for", why)
        if self.params.prompt_logprobs is not None:
            raise FullAttentionError("prompt_logprobs", "prompt_logprobs need every prompt token computed")
        if self.params.skip_reading_prefix_cache:
            raise FullAttentionError("asked for", "the request asks not to read caches")
        if reason := self.engine.adapters.reason(self.kwargs.get("lora_request")):
            raise FullAttentionError("adapter", reason)

    def _answer_plan(self, lease: Lease, links: Lease | None, layout: Layout) -> TransferPlan:
        if layout.shift is None:
            return TransferPlan.for_answer(lease, links)
        self.report.placement = "in-place"
        lengths = (layout.system.length, *(chunk.length for chunk in layout.chunks))
        return TransferPlan.for_answer(lease, links, Composition(lengths, layout.shift, self._plain_salt()))

    async def _run_chunked(self, plan: TransferPlan, lease: Lease, salt: str) -> Outputs:
        """Outputs over the cached chunks; before the first one, it may raise :class:`FullAttentionError`."""
        self._describe_chunks(lease)
        self._name_documents(lease)
        comparison = self._comparison()
        params = (comparison.params if comparison else self.params).clone()
        params.extra_args = {**(params.extra_args or {}), "kv_transfer_params": plan.to_params()}
        has_output = False
        async with aclosing(self._generate({**self.prompt, "cache_salt": salt}, params)) as outputs:
            async for output in outputs:
                if not has_output and _is_error(output) and await self._forget_refused(lease):
                    raise FullAttentionError("load refused", "a worker refused to load the cached chunks")
                has_output = True
                if comparison is not None:
                    await self._compare(comparison, output)
                yield self._with_report(output)

    async def _run_full(self, fallback: FullAttentionError) -> Outputs:
        if self.options.mode == "chunked":
            raise ChunkCacheUnavailableError(
                f"cache.mode is chunked, but {fallback}", parameter="cache.mode", value="chunked"
            )
        self.report.mode, self.report.reason = "full", str(fallback)
        self.report.links = self.report.placement = None
        if self.engine.manager is not None:
            self.engine.manager.metrics.full_reasons[fallback.kind] += 1
        if self.chunked_prompt is not None and self.options.explain:
            self.report.segments = explain_segments(self.chunked_prompt, None)
        for chunk in self.report.chunks:
            chunk.key = chunk.status = chunk.origin = chunk.why = None
        async with aclosing(self._generate(self._plain_prompt(), self.params)) as outputs:
            async for output in outputs:
                yield self._with_report(output)

    def _plain_prompt(self) -> dict[str, Any]:
        """The same tokens, for full attention."""
        salt = self._plain_salt()
        return self.prompt if salt is None else {**self.prompt, "cache_salt": salt}

    def _comparison(self) -> Comparison | None:
        if self.options.mode != "compare":
            return None
        cache = self.engine.llm.vllm_config.cache_config
        block_tokens = cache.block_size if cache.enable_prefix_caching else None
        return Comparison(self.params, self.engine.llm.model_config, block_tokens)

    async def _compare(self, comparison: Comparison, output: RequestOutput) -> None:
        """Takes down an output; with the last one, full attention answers too."""
        comparison.note(output)
        if not output.finished or _is_error(output):
            return
        self._note_times(output)

        def run(name: str, prompt: dict[str, Any], params: SamplingParams) -> Outputs:
            return self._generate(prompt, params, f"{self.request_id}-{name}")

        with self.span.child("tessera.compare"):
            self.report.compare = await comparison.with_full(self._plain_prompt(), run, self.report.timings_ms)

    async def _link(self, lease: Lease, layout: Layout) -> Lease | None:
        """A lease on link tokens, if there are to be any, all of them computed; raises :class:`FullAttentionError`."""
        assert self.chunked_prompt is not None
        assert self.engine.manager is not None
        options, manager = self.options, self.engine.manager
        if options.link_tokens:
            self.report.links = Links(tokens=options.link_tokens, context=options.link_context)
        placements = link_placements(layout, options.link_tokens)
        if not placements:
            return None
        links = borrow_links(manager, self.chunked_prompt.token_ids, placements, self.scope)
        started = time.perf_counter()
        try:
            with self.span.child("tessera.link") as span:
                span.describe({"links": len(placements)})
                linker = Linker(
                    self.engine.llm, manager, self.request_id, self._salt_of_link(layout), self._own_kwargs(span)
                )
                self.linked = await linker.link(lease, links, options.link_context)
        except BaseException as error:
            self.engine.release(links)
            if isinstance(error, LinkError):
                await self._forget_refused(lease)
            raise
        finally:
            self.report.timings_ms["link"] = (time.perf_counter() - started) * 1e3
        return links

    def _salt_of_link(self, layout: Layout) -> Callable[[int], str]:
        """Chained link requests compose what the request itself does; others are all different from it."""
        if self.options.link_context == "chained":
            return lambda _: self._layout_salt(layout)
        return lambda number: self._layout_salt(layout, "link", number)

    def _own_kwargs(self, span: Span) -> dict[str, Any]:
        """What requests for this one's KV are sent with."""
        kwargs = {name: self.kwargs[name] for name in _FILL_KWARGS if self.kwargs.get(name) is not None}
        return {**kwargs, "trace_headers": span.headers}

    async def _fill(self, lease: Lease) -> list[FillResult]:
        assert self.engine.fills is not None
        if all(segment.status is ChunkStatus.HIT for segment in lease.segments):
            return []
        started = time.perf_counter()
        try:
            with self.span.child("tessera.fill") as span:
                span.describe({"fills": len(lease.fills)})
                documents, kwargs = self._documents(lease), self._own_kwargs(span)
                tasks = self.engine.fills.start(lease, self.request_id, self._plain_salt(), documents, **kwargs)
                return await self.engine.fills.wait(lease, tasks)
        finally:
            self.report.timings_ms["fill"] = (time.perf_counter() - started) * 1e3

    def _generate(self, prompt: dict[str, Any], params: SamplingParams, name: str | None = None) -> Outputs:
        outputs: Outputs = self.engine.llm.generate(prompt, params, name or self.request_id, **self.kwargs)
        return outputs

    async def _forget_refused(self, lease: Lease) -> bool:
        """Drops the segments that a worker refused to load, so that the next request fills them anew.

        False if there are none: the engine's error has another cause.
        """
        assert self.engine.manager is not None
        tags = [segment.entry.tag for segment in lease.segments]
        by_worker = await self.engine.llm.collective_rpc("chunk_cache_refused_tags", args=(tags,))
        refused = set().union(*by_worker)
        if not refused:
            return False
        self.engine.manager.metrics.refused_loads += 1
        logger.error("request %s: a worker refused to load cached chunks; recomputing", self.request_id)
        for segment in lease.segments:
            if segment.entry.tag in refused:
                self.engine.manager.detach(segment.entry, Removal.REFUSED)
        return True

    def _with_report(self, output: RequestOutput) -> RequestOutput:
        self._note_times(output)
        if output.finished:
            self._count(output)
            self.ticket.report = self.report
            if self.engine.is_traced:
                self.span.describe({"request_id": self.request_id, **summary(self.report)})
            log_finished(self.request_id, self.report)
            output.kv_transfer_params = {"cache": self.report.to_dict()}
        return output

    def _note_times(self, output: RequestOutput) -> None:
        timings = self.report.timings_ms
        timings.setdefault("first_token", self._elapsed_ms())
        if output.finished and "total" not in timings:
            timings.update(_engine_timings_ms(output))
            timings["total"] = self._elapsed_ms()

    def _count(self, output: RequestOutput) -> None:
        tokens = self.report.tokens
        tokens.computed = tokens.prompt - (output.num_cached_tokens or 0)
        if self.report.mode == "chunked":
            tokens.computed += sum(result.num_computed_of_saved for result in (*self.filled, *self.linked))
        tokens.reused = tokens.prompt - tokens.computed
        tokens.fill_computed = sum(result.num_computed for result in (*self.filled, *self.linked))
        if self.engine.manager is None:
            return
        metrics = self.engine.manager.metrics
        metrics.requests[self.report.mode] += 1
        for name in ("reused", "computed", "fill_computed"):
            metrics.tokens[name] += getattr(tokens, name)

    def _describe_chunks(self, lease: Lease) -> None:
        self.report.mode = "chunked"
        pairs = zip(lease.fills, self.filled, strict=False)
        sources = {entry: result.source for job, result in pairs if result.source for entry in job.entries}
        for chunk, segment in zip(self.report.chunks, lease.chunks, strict=True):
            chunk.key, chunk.status = str(segment.entry.key), segment.status
            if (source := sources.get(segment.entry)) is not None:
                chunk.status, chunk.origin, chunk.why = source

    def _name_documents(self, lease: Lease) -> None:
        assert self.engine.manager is not None
        for entry, key in self._documents(lease).items():
            self.engine.manager.name(key, entry)

    def _documents(self, lease: Lease) -> dict[ChunkKVCache, DocumentKey]:
        """By which keys the registry knows the lease's segments; the system segment by its own."""
        keys = self.ticket.document_keys
        if not keys or self.chunked_prompt is None:
            return {}
        documents = {s.entry: keys[c.document] for c, s in zip(self.chunked_prompt.chunks, lease.chunks, strict=True)}
        if lease.system is not None:
            documents[lease.system.entry] = DocumentKey(lease.system.entry.key.digest)
        return documents

    def _new_report(self) -> Report:
        options, chunks = self.options, self.chunked_prompt.chunks if self.chunked_prompt else ()
        num_tokens = len(self.prompt["prompt_token_ids"])
        decision = Decided(mode=options.decision.mode, why=options.decision.why) if options.decision else None
        return Report.begun(options.position_strategy, options.scope, num_tokens, chunks, decision)

    def _layout_salt(self, layout: Layout, *more: int | str) -> str:
        assert self.engine.manager is not None
        assert self.chunked_prompt is not None
        options = self.options
        parts = [*layout.salt_parts(), options.scope, *(self.chunked_prompt.opening or ()), *more]
        if options.link_tokens:
            parts += ["links", options.link_context, options.link_tokens]
        return self.engine.manager.hasher.layout_salt(self.scope, parts)

    def _plain_salt(self) -> str | None:
        return self.engine.plain_salt(self.scope, self.prompt.get("cache_salt"))

    def _elapsed_ms(self) -> float:
        return (time.perf_counter() - self.started) * 1e3


_FILL_KWARGS = ("lora_request", "priority", "data_parallel_rank")


def _is_error(output: RequestOutput) -> bool:
    return any(completion.finish_reason == "error" for completion in output.outputs)


def _engine_timings_ms(output: RequestOutput) -> dict[str, float]:
    """What only vLLM knows: the time in its queue, and, for an answer given at once, when the first token was there."""
    metrics = output.metrics
    if metrics is None or not metrics.queued_ts:
        return {"queue": 0.0}
    return {
        "queue": (metrics.scheduled_ts - metrics.queued_ts) * 1e3,
        "first_token": metrics.first_token_latency * 1e3,
    }
