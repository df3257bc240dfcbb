# SPDX-License-Identifier: Apache-2.0
"""The answer to one request with chunks: over cached chunks, or in full attention; its last output has the report."""

import logging
from collections.abc import Sequence
from contextlib import AsyncExitStack, aclosing, nullcontext
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.outputs import RequestOutput

from cache.errors import FullAttentionError
from cache.positions.layout import Layout
from cache.windows import Window
from engine_ext.chunks.cache_off import CacheOff
from engine_ext.chunks.chunk_cache import ChunkCache
from engine_ext.client.attention import attention_of_answer, attention_to_chunks
from engine_ext.client.call import EngineCall, KVForm, Stages, is_error, transfer_params
from engine_ext.client.citations import AnswerSoFar, citations
from engine_ext.client.defects import blamed
from engine_ext.client.handed_over import HandedOver, HandoverError, given_away
from engine_ext.client.recompute import Recomputed, recomputed, text_windows, windows_of
from engine_ext.client.reporting import Reporter
from engine_ext.client.request import Outputs, ResolvedRequest, Ticket, plain_salt, scope_salt
from engine_ext.client.reread import reread
from engine_ext.client.segments import FilledSegments, filled_segments
from engine_ext.client.sparse import selected
from engine_ext.client.threads import in_thread
from engine_ext.client.tracing import TraceSpan
from engine_ext.wire.plan import Elsewhere, TransferPlan

logger = logging.getLogger(__name__)


class ChunkCacheUnavailableError(VLLMValidationError):
    """A request with ``cache.mode = "chunked"`` can't use the cache; the message says why. Nothing was run."""


class Answer:
    """One request within ``span``, which ends with it; ``None``: it is not traced."""

    def __init__(
        self,
        cache: ChunkCache | CacheOff,
        request: ResolvedRequest,
        ticket: Ticket,
        call: EngineCall,
        span: TraceSpan | None = None,
    ) -> None:
        self._cache = cache
        self._request = request
        self._ticket = ticket
        self._call = call
        self._span = span
        self._stages = Stages(call.kwargs.get("trace_headers"), span)
        self._reporter = Reporter(request, call.num_prompt_tokens, self._stages, cache.metrics, ticket)

    async def outputs(self, handover: HandedOver | None = None) -> Outputs:
        """The request's outputs; the last one carries the report.

        ``handover``: KV that another engine has for the request.
        """
        try:
            with self._span or nullcontext():
                if handover is not None:
                    try:
                        async with aclosing(self._handed_over(handover)) as answered:
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
        except Exception as error:
            raise blamed(error) from None

    async def _chunked(self) -> Outputs:
        """Outputs over cached chunks; before the first one, it may raise :class:`FullAttentionError`."""
        request, call = self._request, self._call
        attention: Sequence[Sequence[float]] | None = None
        if request.options.sparse is not None:
            selection = await selected(self._cache, request, call, self._stages)
            self._reporter.selected(selection)
            request, call = selection.request, selection.prompt_of(call)
            if selection.kept is not None:
                attention = [selection.attention[index] for index in selection.kept]
        async with AsyncExitStack() as stack:
            filled = await stack.enter_async_context(filled_segments(self._cache, request, call, self._stages))
            self._reporter.computed(filled.fills)
            if filled.placed.chooses and attention is None:
                attention = await self._attention(filled, call)
            fresh = None
            if filled.placed.most_windows and (windows := self._windows(filled, attention)):
                fresh = await stack.enter_async_context(recomputed(filled, windows, call, self._stages))
            self._reporter.chunked(filled, fresh)
            if request.document_keys:
                filled.name_documents()
            asked, layout = call, filled.placed.layout
            share = request.options.reread
            if share and attention and (again := reread(request.chunked(), layout, attention, share, call)):
                asked, layout = again.call, again.layout
                self._reporter.reread(again)
            form = self._composed_form(asked, layout, self._plan(filled, fresh), fresh)
            answer = AnswerSoFar() if self._request.options.cite else None
            is_first = True
            async with aclosing(asked.generate(form)) as outputs:
                async for output in outputs:
                    if is_first and is_error(output) and await filled.forget_refused(call.request_id):
                        raise FullAttentionError("load refused", "a worker refused to load the cached chunks")
                    is_first = False
                    if answer is not None:
                        answer.add(output, call.params)
                        if output.finished:
                            await self._cite(answer, filled, fresh, call)
                    yield self._reported(output, form)

    async def _full(self, fallback: FullAttentionError) -> Outputs:
        if self._request.options.mode == "chunked":
            raise ChunkCacheUnavailableError(
                f"cache.mode is chunked, but {fallback}", parameter="cache.mode", value="chunked"
            )
        self._reporter.full(fallback)
        form = self._plain_form()
        async with aclosing(self._call.generate(form)) as outputs:
            async for output in outputs:
                yield self._reported(output, form)

    async def _handed_over(self, handover: HandedOver) -> Outputs:
        """Outputs over another engine's blocks; raises :class:`HandoverError` before the first one."""
        metrics = self._cache.metrics
        try:
            form = self._form_elsewhere() if handover.is_chunked else self._plain_form()
        except FullAttentionError as error:
            raise await handover.refused(self._call, f"in full attention here: {error}", metrics) from error
        options = self._request.options
        if handover.report is None or options.sparse is not None or options.reread:
            raise await handover.refused(self._call, "the request needs an answer of this engine alone", metrics)
        is_first = True
        async with aclosing(handover.outputs(self._call, form, metrics)) as outputs:
            async for output in outputs:
                if is_first:
                    self._reporter.handed_over(handover.report)
                is_first = False
                yield self._reported(output, form)

    async def _attention(self, filled: FilledSegments, call: EngineCall) -> Sequence[Sequence[float]]:
        """Measures the question's attention to each token of each chunk."""
        with self._stages.stage("select"):
            attention = await attention_to_chunks(filled, call)
        self._reporter.measured(attention)
        return attention

    def _windows(self, filled: FilledSegments, attention: Sequence[Sequence[float]] | None) -> list[Window]:
        """The windows to compute anew: text between documents, and by the attention to the chunks."""
        text = text_windows(filled)
        if attention is None or not filled.placed.most_chosen_windows:
            return text
        return sorted([*text, *windows_of(filled, attention)], key=lambda each: each.start)

    async def _cite(
        self, answer: AnswerSoFar, filled: FilledSegments, fresh: Recomputed | None, call: EngineCall
    ) -> None:
        """Reports what the sentences of the ``answer`` rest on, or why that isn't known: the answer is there."""
        try:
            if call.num_answers > 1:
                raise FullAttentionError("citations", "the request has several answers")
            self._cache.usable().check_attention()
            with self._stages.stage("cite"):
                paid, expected = await attention_of_answer(filled, fresh, answer.token_ids, call)
                found = await in_thread(citations, answer.text, answer.places(call), paid, expected)
        except FullAttentionError as error:
            self._reporter.uncited(str(error))
        except Exception:
            logger.exception("request %s: its citations could not be measured", call.request_id)
            self._reporter.uncited("they could not be measured; see the server's log")
        else:
            self._reporter.cited(found)
            self._ticket.cited = answer.text

    def _plan(self, filled: FilledSegments, fresh: Recomputed | None) -> TransferPlan:
        """The load plan of the main request."""
        composition = self._request.composition(self._cache.hasher, filled.placed.layout)
        segments = fresh.segments if fresh else ()
        return TransferPlan.for_answer(filled.lease, segments, composition, attends=filled.attends)

    def _composed_form(
        self, call: EngineCall, layout: Layout, plan: TransferPlan, fresh: Recomputed | None = None
    ) -> KVForm:
        """The KV that ``plan`` composes for the prompt of ``call``."""
        salt = self._request.composed_salt(self._cache.hasher, layout, fresh.windows if fresh else ())
        added = plan.to_params()
        if not plan.attends and plan.elsewhere is None:  # else its blocks lack the chunks, or may be lost
            added |= self._prefix_params(call, plan.num_loaded_tokens)
        prompt, block_order = call.with_salt(salt), self._cache.block_order
        return KVForm("chunked", layout.placement, salt, block_order, prompt, added, layout.reach)

    def _plain_form(self) -> KVForm:
        """The same tokens in full attention."""
        hasher, scope, call = self._cache.hasher, self._request.scope, self._call
        salt, prompt = scope_salt(hasher, scope), call.with_salt(plain_salt(hasher, scope))
        added = self._prefix_params(call)
        return KVForm("full", "copy", salt, self._cache.block_order, prompt, added, call.num_prompt_tokens)

    def _form_elsewhere(self) -> KVForm:
        """The KV that another engine composed; raises :class:`FullAttentionError` if this one would not."""
        request, cache = self._request, self._cache.usable()
        layout = request.layout(cache.reindexer)
        elsewhere = Elsewhere(plain_salt(cache.hasher, request.scope))
        plan = TransferPlan(composition=request.composition(cache.hasher, layout), elsewhere=elsewhere)
        return self._composed_form(self._call, layout, plan)

    def _prefix_params(self, call: EngineCall, num_chunked: int = 0) -> dict[str, Any]:
        prefixes = self._cache.prefixes
        return prefixes.params(self._request.scope, call.num_prompt_tokens, num_chunked) if prefixes else {}

    def _reported(self, output: RequestOutput, form: KVForm) -> RequestOutput:
        self._reporter.note(output)
        if output.finished:
            self._ticket.report = self._reporter.finish(output, self._call.request_id, self._span)
        return given_away(output, form, self._call) if transfer_params(self._call.params) else output
