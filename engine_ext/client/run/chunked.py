# SPDX-License-Identifier: Apache-2.0
"""One request with chunks: prepared and composed, or in full attention."""

from contextlib import aclosing
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.outputs import RequestOutput

from cache.positions.layout import Layout
from engine_ext.chunks.cache_off import CacheOff
from engine_ext.chunks.chunk_cache import ChunkCache
from engine_ext.client.resolved import ResolvedRequest, scope_salt
from engine_ext.client.run.call import EngineCall, is_error, with_transfer_params
from engine_ext.client.run.handed_over import HandedOver, HandoverError, KVForm
from engine_ext.client.run.preparation import FilledSegments, computed_links, filled_segments
from engine_ext.client.run.reporting import Reporter
from engine_ext.client.run.selection import selected
from engine_ext.client.stages import Stages
from engine_ext.client.tracing import Span
from engine_ext.wire.plan import Elsewhere, TransferPlan
from engine_ext.wire.request import FullAttentionError, Outputs, Ticket


class ChunkCacheUnavailableError(VLLMValidationError):
    """A request with ``cache.mode = "chunked"`` can't use the cache; the message says why. Nothing was run."""


class ChunkedRun:
    """Runs one request within ``span``, which ends with it."""

    def __init__(
        self,
        cache: ChunkCache | CacheOff,
        request: ResolvedRequest,
        ticket: Ticket,
        call: EngineCall,
        handover: HandedOver | None,
        span: Span,
    ) -> None:
        """``handover``: KV that another engine has for the request."""
        self._cache = cache
        self._request = request
        self._ticket = ticket
        self._call = call
        self._handover = handover
        self._span = span
        self._stages = Stages(span)
        self._reporter = Reporter(request, call.num_prompt_tokens, self._stages, cache.metrics, ticket.retrieved)

    async def outputs(self) -> Outputs:
        """The request's outputs; the last one carries the report."""
        with self._span:
            if self._handover is not None:
                try:
                    async with aclosing(self._handed_over(self._handover)) as answered:
                        async for output in answered:
                            yield output
                    return
                except HandoverError as error:
                    self._reporter.not_handed_over(error.handed)
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

    async def _handed_over(self, handover: HandedOver) -> Outputs:
        """Outputs over another engine's blocks; raises :class:`HandoverError` before the first one."""
        metrics = self._cache.metrics
        try:
            form = self._form_elsewhere() if handover.is_chunked else self._plain_form()
        except FullAttentionError as error:
            raise await handover.refused(self._call, f"in full attention here: {error}", metrics) from error
        if handover.report is None or self._request.sparse is not None:
            raise await handover.refused(self._call, "the request needs an answer of this engine alone", metrics)
        has_output = False
        async with aclosing(handover.outputs(self._call, form, metrics)) as outputs:
            async for output in outputs:
                if not has_output:
                    self._reporter.handed_over(handover.report)
                has_output = True
                yield self._reported(output, form)

    async def _chunked(self) -> Outputs:
        """Outputs over cached chunks; before the first one, it may raise :class:`FullAttentionError`."""
        selection = await selected(self._cache, self._request, self._call, self._stages)
        self._reporter.selected(selection)
        async with filled_segments(self._cache, selection.request, self._call, self._stages) as segments:
            self._reporter.computed(segments.fills)
            async with computed_links(segments, self._call, self._stages) as links:
                self._reporter.computed(links.results)
                self._reporter.chunked(segments)
                segments.name_documents()
                form = self._composed_form(selection.prompt_of(self._call), segments.layout, segments.plan(links.lease))
                async with aclosing(self._composed(segments, form)) as outputs:
                    async for output in outputs:
                        yield output

    async def _composed(self, segments: FilledSegments, form: KVForm) -> Outputs:
        params = with_transfer_params(self._call.within_positions(form.reach).params, form.added)
        has_output = False
        async with aclosing(self._call.generate(form.prompt, params)) as outputs:
            async for output in outputs:
                if not has_output and is_error(output) and await segments.forget_refused(self._call.request_id):
                    raise FullAttentionError("load refused", "a worker refused to load the cached chunks")
                has_output = True
                yield self._reported(output, form)

    async def _full(self, fallback: FullAttentionError) -> Outputs:
        if self._request.mode == "chunked":
            raise ChunkCacheUnavailableError(
                f"cache.mode is chunked, but {fallback}", parameter="cache.mode", value="chunked"
            )
        self._reporter.full(fallback)
        form = self._plain_form()
        params = with_transfer_params(self._call.within_positions(form.reach).params, form.added)
        async with aclosing(self._call.generate(form.prompt, params)) as outputs:
            async for output in outputs:
                yield self._reported(output, form)

    def _plain_form(self) -> KVForm:
        """The same tokens in full attention."""
        hasher, call = self._cache.hasher, self._call
        salt, prompt = scope_salt(hasher, self._request.scope), call.with_salt(self._request.plain_salt(hasher))
        added = self._prefix_params(call)
        return KVForm("full", "copy", salt, self._cache.block_order, prompt, added, call.num_prompt_tokens)

    def _composed_form(self, call: EngineCall, layout: Layout, plan: TransferPlan) -> KVForm:
        """The KV that ``plan`` composes for the prompt of ``call``."""
        salt, added = self._request.composed_salt(self._cache.hasher, layout), plan.to_params()
        if not plan.attends and plan.elsewhere is None:  # else its blocks lack the chunks, or may be lost
            added |= self._prefix_params(call, plan.num_loaded_tokens)
        prompt, block_order = call.with_salt(salt), self._cache.block_order
        return KVForm("chunked", layout.placement, salt, block_order, prompt, added, layout.reach)

    def _form_elsewhere(self) -> KVForm:
        """The KV that another engine composed; raises :class:`FullAttentionError` if this one would not."""
        request, cache = self._request, self._cache.usable()
        layout = request.layout(cache)
        plain_salt = request.plain_salt(cache.hasher)
        plan = TransferPlan(composition=request.composition(cache.hasher, layout), elsewhere=Elsewhere(plain_salt))
        return self._composed_form(self._call, layout, plan)

    def _prefix_params(self, call: EngineCall, num_chunked: int = 0) -> dict[str, Any]:
        return self._cache.prefixes.params(self._request.scope, call.num_prompt_tokens, num_chunked)

    def _reported(self, output: RequestOutput, form: KVForm) -> RequestOutput:
        self._reporter.note(output)
        if output.finished:
            self._ticket.report = self._reporter.finish(output, self._call.request_id, self._span)
        return form.given_away(output, self._call)
