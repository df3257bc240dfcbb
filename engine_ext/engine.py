# SPDX-License-Identifier: Apache-2.0
"""The engine client that vLLM's serving layer talks to: ``AsyncLLM`` with the chunk cache around ``generate``."""

import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from cache.hashing import CacheScope
from cache.layout import ChunkedPrompt, Layout, PositionReindexer
from cache.manager import CapacityError, ChunkCacheManager, IntegrityError, Lease
from cache.report import CacheReport, ChunkReport, TokenCounts, explain_segments
from engine_ext.fills import FillResult, FillRunner
from engine_ext.plan import PARAMS_KEY, TransferPlan
from engine_ext.request import REQUEST_KEY, ChunkedRequest, FullAttentionError, Ticket

logger = logging.getLogger(__name__)

Outputs = AsyncGenerator[RequestOutput, None]


class ChunkCacheUnavailableError(VLLMValidationError):
    """``cache.mode = "chunked"`` was asked for and can't be given; the message says why. Nothing was run."""


class ChunkEngine:
    """Runs requests with chunks from the chunk cache; passes everything else through to ``AsyncLLM``.

    ``manager`` is ``None`` when the cache is off; ``disabled_reason`` then says why.
    """

    def __init__(self, llm: AsyncLLM, manager: ChunkCacheManager | None, disabled_reason: str | None) -> None:
        self.llm = llm
        self.manager = manager
        self.disabled_reason = disabled_reason
        self.fills = FillRunner(llm, manager, self._check_if_idle) if manager else None
        # What vLLM's serving layer renders prompts with; the app puts its own around it.
        self.renderer: Any = llm.renderer
        self._reindexer = PositionReindexer()
        self._next_integrity_check = 0.0

    def __getattr__(self, name: str) -> Any:
        """Everything else of vLLM's ``EngineClient`` is ``AsyncLLM``'s."""
        return getattr(self.llm, name)

    def generate(self, prompt: Any, sampling_params: SamplingParams, request_id: str, **kwargs: Any) -> Outputs:
        """vLLM's ``generate``. A prompt that carries a :class:`ChunkedRequest` runs through the chunk cache."""
        request = prompt.pop(REQUEST_KEY, None) if isinstance(prompt, dict) else None
        _refuse_foreign_plan(sampling_params, any_params=self.manager is not None)
        if request is None:
            outputs: Outputs = self.llm.generate(prompt, sampling_params, request_id, **kwargs)
            return outputs
        return _ChunkedRun(self, request, prompt, sampling_params, request_id, kwargs).outputs()

    async def notify_kv_transfer_request_rejected(
        self, request_id: str, kv_transfer_params: dict[str, Any], **kwargs: Any
    ) -> None:
        """vLLM's hook for prefill/decode splits, fed from client input: with our connector there is no split."""
        if self.manager is None and PARAMS_KEY not in kv_transfer_params:
            await self.llm.notify_kv_transfer_request_rejected(request_id, kv_transfer_params, **kwargs)

    async def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        """vLLM's reset, after which no KV of before is used (new weights, say): it empties the chunk cache too."""
        self._forget_all()
        return bool(await self.llm.reset_prefix_cache(*args, **kwargs))

    async def sleep(self, *args: Any, **kwargs: Any) -> None:
        """vLLM's sleep mode discards KV; the chunk cache is emptied with it."""
        self._forget_all()
        await self.llm.sleep(*args, **kwargs)

    def layout(self, prompt: ChunkedPrompt, ticket: Ticket) -> Layout:
        """Where each of the prompt's segments goes."""
        return self._reindexer.layout(prompt, ticket.options.position_strategy)

    def acquire(self, prompt: ChunkedPrompt, layout: Layout, scope: CacheScope) -> Lease:
        """A lease on the prompt's segments; raises :class:`FullAttentionError` if there can be none."""
        if self.manager is None or self.disabled_reason:
            raise FullAttentionError("cache off", self.disabled_reason or "the chunk cache is off")
        try:
            return self.manager.acquire(prompt, layout, scope)
        except CapacityError as error:
            raise FullAttentionError("capacity", str(error)) from error

    def release(self, lease: Lease) -> None:
        """Ends a lease, and aborts fills that nobody wants any more."""
        assert self.fills is not None
        self.fills.release(lease)
        self._check_if_idle()

    def _check_if_idle(self) -> None:
        """Checks the manager's books if nothing is under way, at most once a second."""
        assert self.manager is not None
        if time.monotonic() >= self._next_integrity_check and self.manager.is_idle:
            self.check_integrity()

    def _forget_all(self) -> None:
        if self.manager is not None:
            for entry in list(self.manager.index):
                self.manager.detach(entry)

    def check_integrity(self) -> None:
        """Checks the manager's books; if they are wrong, turns the cache off for good."""
        assert self.manager is not None
        self._next_integrity_check = time.monotonic() + 1.0
        try:
            self.manager.check_integrity()
        except IntegrityError as error:
            self.disabled_reason = f"integrity check failed: {error}"
            logger.critical("chunk cache disabled: %s", self.disabled_reason)


class _ChunkedRun:
    """One request with chunks, from plan to report."""

    def __init__(
        self,
        engine: ChunkEngine,
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


def _refuse_foreign_plan(params: Any, *, any_params: bool) -> None:
    """A client's plan could name pages that aren't its own, or break the connector (also when the cache is off).

    With the cache on, no other ``kv_transfer_params`` have a meaning either.
    """
    given = (getattr(params, "extra_args", None) or {}).get("kv_transfer_params")
    if given and (any_params or PARAMS_KEY in given):
        raise VLLMValidationError(
            "kv_transfer_params is reserved for the chunk cache on this server", parameter="kv_transfer_params"
        )


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
