# SPDX-License-Identifier: Apache-2.0
"""One request with chunks: prepared and composed, or in full attention."""

from contextlib import aclosing
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.outputs import RequestOutput

from engine_ext.chunks.chunk_cache import CacheOff, ChunkCache
from engine_ext.client.resolved import ResolvedRequest
from engine_ext.client.run.call import EngineCall, is_error, with_transfer_params
from engine_ext.client.run.comparison import Comparison
from engine_ext.client.run.preparation import FilledSegments, computed_links, filled_segments
from engine_ext.client.run.reporting import Reporter
from engine_ext.client.stages import Stages
from engine_ext.client.tracing import Span
from engine_ext.wire.plan import TransferPlan
from engine_ext.wire.request import FullAttentionError, Outputs, RequestContext


class ChunkCacheUnavailableError(VLLMValidationError):
    """A request with ``cache.mode = "chunked"`` can't use the cache; the message says why. Nothing was run."""


class ChunkedRun:
    """Runs one request within ``span``, which ends with it."""

    def __init__(
        self,
        cache: ChunkCache | CacheOff,
        request: ResolvedRequest,
        ticket: RequestContext,
        call: EngineCall,
        span: Span,
    ) -> None:
        self._cache = cache
        self._request = request
        self._ticket = ticket
        self._call = call
        self._span = span
        self._stages = Stages(span)
        self._reporter = Reporter(request, len(call.prompt["prompt_token_ids"]), self._stages, cache.metrics)

    async def outputs(self) -> Outputs:
        """The request's outputs; the last one carries the report."""
        with self._span:
            try:
                async with aclosing(self._chunked()) as chunked:
                    async for output in chunked:
                        yield output
                return
            except FullAttentionError as error:
                fallback = error
            async with aclosing(self._full(fallback)) as full:
                async for output in full:
                    yield output

    async def _chunked(self) -> Outputs:
        """Outputs over cached chunks; before the first one, it may raise :class:`FullAttentionError`."""
        async with filled_segments(self._cache, self._request, self._call, self._stages) as segments:
            self._reporter.computed(segments.fills)
            async with computed_links(segments, self._call, self._stages) as links:
                self._reporter.computed(links.results)
                self._reporter.chunked(segments)
                segments.name_documents()
                async with aclosing(self._composed(segments, segments.plan(links.lease))) as outputs:
                    async for output in outputs:
                        yield output

    async def _composed(self, segments: FilledSegments, plan: TransferPlan) -> Outputs:
        comparison = self._comparison()
        added = plan.to_params()
        if plan.attention is None:  # else its blocks lack the chunks
            added |= self._prefix_params(plan.num_loaded_tokens)
        params = with_transfer_params((comparison or self._call).params, added)
        has_output = False
        async with aclosing(self._call.generate(self._call.with_salt(segments.salt()), params)) as outputs:
            async for output in outputs:
                if not has_output and is_error(output) and await segments.forget_refused(self._call.request_id):
                    raise FullAttentionError("load refused", "a worker refused to load the cached chunks")
                has_output = True
                if comparison is not None:
                    await self._compare(comparison, output)
                yield self._reported(output)

    async def _full(self, fallback: FullAttentionError) -> Outputs:
        if self._request.mode == "chunked":
            raise ChunkCacheUnavailableError(
                f"cache.mode is chunked, but {fallback}", parameter="cache.mode", value="chunked"
            )
        self._reporter.full(fallback)
        params = with_transfer_params(self._call.params, self._prefix_params())
        async with aclosing(self._call.generate(self._plain_prompt(), params)) as outputs:
            async for output in outputs:
                yield self._reported(output)

    def _plain_prompt(self) -> dict[str, Any]:
        """The same tokens, for full attention."""
        return self._call.with_salt(self._request.plain_salt(self._cache.hasher))

    def _prefix_params(self, num_chunked: int = 0) -> dict[str, Any]:
        num_prompt = len(self._call.prompt["prompt_token_ids"])
        return self._cache.prefixes.params(self._request.scope, num_chunked=num_chunked, num_prompt=num_prompt)

    def _comparison(self) -> Comparison | None:
        return Comparison.of_call(self._call) if self._request.mode == "compare" else None

    async def _compare(self, comparison: Comparison, output: RequestOutput) -> None:
        """Records an output; after the last one, full attention answers too."""
        comparison.note(output)
        if not output.finished or is_error(output):
            return
        self._reporter.note_times(output)
        with self._span.child("tessera.compare"):
            self._reporter.compared(await comparison.with_full(self._plain_prompt(), self._stages.timings_ms))

    def _reported(self, output: RequestOutput) -> RequestOutput:
        self._reporter.note_times(output)
        if output.finished:
            self._ticket.report = self._reporter.report
            self._reporter.finish(output, self._call.request_id, self._span)
        return output
