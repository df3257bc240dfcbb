# SPDX-License-Identifier: Apache-2.0
"""One request with chunks, from plan to report."""

import logging
import time
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from vllm.exceptions import VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams

from cache.hashing import CacheScope
from cache.layout import Layout
from cache.manager import Lease
from cache.report import CacheReport, ChunkReport, TokenCounts, explain_segments
from engine_ext.fills import FillResult
from engine_ext.plan import TransferPlan
from engine_ext.request import ChunkedRequest, FullAttentionError, Outputs, Ticket

if TYPE_CHECKING:
    from engine_ext.engine import ChunkEngine

logger = logging.getLogger(__name__)


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
        self.kwargs = kwargs
        self.scope = _scope(request.ticket, prompt.get("cache_salt"), kwargs.get("lora_request"))
        self.started = time.perf_counter()
        self.report = self._new_report()
        self.filled: list[FillResult] = []

    async def outputs(self) -> Outputs:
        """The request's outputs; the last one carries the report."""
        try:
            lease, layout = self._plan()
            try:
                async with aclosing(self._run_chunked(lease, layout)) as chunked:
                    async for output in chunked:
                        yield output
                return
            finally:
                self.engine.release(lease)
        except FullAttentionError as error:
            fallback = error
        async with aclosing(self._run_full(fallback)) as full:
            async for output in full:
                yield output

    def _plan(self) -> tuple[Lease, Layout]:
        """A lease on the segments and their layout; raises :class:`FullAttentionError` if they shan't be reused."""
        if self.chunked_prompt is None:
            raise FullAttentionError("no chunks", "the request has no chunks")
        self._refuse_what_needs_full_attention()
        layout = self.engine.layout(self.chunked_prompt, self.ticket)
        if self.ticket.options.explain:
            self.report.segments = explain_segments(self.chunked_prompt, layout)
        lease = self.engine.acquire(self.chunked_prompt, layout, self.scope)
        self.report.timings_ms["plan"] = self._elapsed_ms()
        return lease, layout

    def _refuse_what_needs_full_attention(self) -> None:
        if self.ticket.options.mode == "full":
            raise FullAttentionError("asked for", "cache.mode is full")
        if self.params.prompt_logprobs is not None:
            raise FullAttentionError("prompt_logprobs", "prompt_logprobs need every prompt token computed")
        if self.params.skip_reading_prefix_cache:
            raise FullAttentionError("asked for", "the request asks not to read caches")

    async def _run_chunked(self, lease: Lease, layout: Layout) -> Outputs:
        """Outputs under chunk-isolated attention; before the first one, it may raise :class:`FullAttentionError`."""
        self.filled = await self._fill(lease)
        self._describe_chunks(lease)
        prompt = {**self.prompt, "cache_salt": self._layout_salt(layout)}
        has_output = False
        async with aclosing(self._generate(prompt, TransferPlan.for_answer(lease))) as outputs:
            async for output in outputs:
                if not has_output and _is_error(output) and await self._forget_refused(lease):
                    raise FullAttentionError("load refused", "a worker refused to load the cached chunks")
                has_output = True
                yield self._with_report(output)

    async def _run_full(self, fallback: FullAttentionError) -> Outputs:
        if self.ticket.options.mode == "chunked":
            raise ChunkCacheUnavailableError(
                f"cache.mode is chunked, but {fallback}", parameter="cache.mode", value="chunked"
            )
        self.report.mode, self.report.reason = "full", str(fallback)
        if self.engine.manager is not None:
            self.engine.manager.metrics.full_reasons[fallback.kind] += 1
        if self.chunked_prompt is not None and self.ticket.options.explain:
            self.report.segments = explain_segments(self.chunked_prompt, None)
        for chunk in self.report.chunks:
            chunk.key = chunk.status = None
        prompt = {**self.prompt}
        if (salt := self._plain_salt()) is not None:
            prompt["cache_salt"] = salt
        async with aclosing(self._generate(prompt, None)) as outputs:
            async for output in outputs:
                yield self._with_report(output)

    async def _fill(self, lease: Lease) -> list[FillResult]:
        assert self.engine.fills is not None
        started = time.perf_counter()
        kwargs = {name: self.kwargs[name] for name in _FILL_KWARGS if self.kwargs.get(name) is not None}
        self.engine.fills.start(lease, self.request_id, self._plain_salt(), **kwargs)
        try:
            return await self.engine.fills.wait(lease)
        finally:
            self.report.timings_ms["fill"] = (time.perf_counter() - started) * 1e3

    def _generate(self, prompt: dict[str, Any], plan: TransferPlan | None) -> Outputs:
        params = self.params
        if plan is not None:
            params = params.clone()
            params.extra_args = {**(params.extra_args or {}), "kv_transfer_params": plan.to_params()}
        outputs: Outputs = self.engine.llm.generate(prompt, params, self.request_id, **self.kwargs)
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
                self.engine.manager.detach(segment.entry)
        return True

    def _with_report(self, output: RequestOutput) -> RequestOutput:
        timings = self.report.timings_ms
        timings.setdefault("first_token", self._elapsed_ms())
        if output.finished:
            timings.update(_engine_timings_ms(output))
            timings["total"] = self._elapsed_ms()
            self._count(output)
            self.ticket.report = self.report
            output.kv_transfer_params = {"cache": self.report.to_dict()}
        return output

    def _count(self, output: RequestOutput) -> None:
        tokens = self.report.tokens
        tokens.computed = tokens.prompt - (output.num_cached_tokens or 0)
        if self.report.mode == "chunked":
            tokens.computed += sum(result.num_computed_of_saved for result in self.filled)
        tokens.reused = tokens.prompt - tokens.computed
        tokens.fill_computed = sum(result.num_computed for result in self.filled)
        if self.engine.manager is None:
            return
        metrics = self.engine.manager.metrics
        metrics.requests[self.report.mode] += 1
        for name in ("reused", "computed", "fill_computed"):
            metrics.tokens[name] += getattr(tokens, name)

    def _describe_chunks(self, lease: Lease) -> None:
        self.report.mode = "chunked"
        for chunk, segment in zip(self.report.chunks, lease.chunks, strict=True):
            chunk.key, chunk.status = str(segment.entry.key), segment.status

    def _new_report(self) -> CacheReport:
        chunks = self.chunked_prompt.chunks if self.chunked_prompt else ()
        return CacheReport(
            position_strategy=self.ticket.options.position_strategy,
            scope="system",
            tokens=TokenCounts(prompt=len(self.prompt["prompt_token_ids"])),
            chunks=[ChunkReport(i, chunk.id, len(chunk.token_ids)) for i, chunk in enumerate(chunks)],
            timings_ms={"plan": 0.0, "fill": 0.0},
        )

    def _layout_salt(self, layout: Layout) -> str:
        assert self.engine.manager is not None
        return self.engine.manager.hasher.layout_salt(self.scope, layout.salt_parts())

    def _plain_salt(self) -> str | None:
        """Salt of plain causal KV: none in the default namespace, where it is what ordinary requests compute."""
        if self.scope.namespace == _DEFAULT_NAMESPACE or self.engine.manager is None:
            return self.prompt.get("cache_salt")
        return self.engine.manager.hasher.layout_salt(self.scope, ["plain"])

    def _elapsed_ms(self) -> float:
        return (time.perf_counter() - self.started) * 1e3


_DEFAULT_NAMESPACE = "default"
_FILL_KWARGS = ("lora_request", "trace_headers", "priority", "data_parallel_rank")


def _scope(ticket: Ticket, cache_salt: str | None, lora: LoRARequest | None) -> CacheScope:
    """A client's own ``cache_salt`` separates caches like a namespace of its own."""
    namespace = ticket.options.namespace
    if cache_salt:
        namespace = f"{namespace}\0{cache_salt}"
    adapter = f"{lora.lora_name}\0{lora.lora_int_id}\0{lora.lora_path}" if lora else ""
    return CacheScope(namespace, adapter)


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
