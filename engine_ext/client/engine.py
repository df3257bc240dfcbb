# SPDX-License-Identifier: Apache-2.0
"""The engine client of vLLM's serving layer: ``AsyncLLM`` with the chunk cache around ``generate``."""

import logging
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from dataclasses import replace
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

import msgspec
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from cache.eviction.removal import Removal
from cache.positions.layout import ChunkedPrompt
from cache.positions.strategy import UNKNOWN, DefaultStrategy
from cache.segments.hashing import CacheScope
from engine_ext.chunks.cache_off import CacheOff
from engine_ext.chunks.chunk_cache import ChunkCache
from engine_ext.client.adapters import Adapters
from engine_ext.client.answer import Answer
from engine_ext.client.background import BackgroundFills
from engine_ext.client.call import EngineCall, KVForm, transfer_params, with_transfer_params, without_transfer_params
from engine_ext.client.defects import blamed
from engine_ext.client.grammars import Grammars
from engine_ext.client.handed_over import HandedOver, ordinary_outputs
from engine_ext.client.logprobs import within_logprobs
from engine_ext.client.position_limit import limit_of
from engine_ext.client.prefetch import Prefetches
from engine_ext.client.request import (
    CALLER,
    IS_PEER,
    PROGRESS,
    REQUEST_KEY,
    ChunkedRequest,
    LimitsError,
    Outputs,
    ResolvedRequest,
    Spending,
    charged,
    own_namespace,
    owner,
    plain_salt,
    resolve,
    salted_namespace,
    scope_salt,
)
from engine_ext.client.tracing import start_request
from engine_ext.wire.handover import HANDOVER_KEY, is_given_away
from engine_ext.wire.plan import PARAMS_KEY
from engine_ext.wire.prefix import PREFIX_KEY
from engine_ext.wire.vllm_compat import GracefulHTTPError

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

logger = logging.getLogger(__name__)

_RESERVED: Final = {PARAMS_KEY, PREFIX_KEY}
"""Keys of ``kv_transfer_params`` that nobody may send."""

_BEAM: Final = "-beam-"
"""In the ids of a beam search's requests, one for each beam and token."""
_POLL_S = 0.02


class ChunkEngine:
    """Runs requests with chunks from the chunk cache; passes everything else through to ``AsyncLLM``.

    ``strategy`` is the position strategy of requests that name none, and why; ``renderer`` renders their prompts.
    ``exchanges_requests``: a connector passes blocks on between engines. ``decode_budget``: tokens that a generated
    token attends to, ``None`` for all. ``is_stopping`` tells that :meth:`shutdown` was called.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        cache: ChunkCache | CacheOff,
        strategy: DefaultStrategy = UNKNOWN,
        renderer: Any = None,
        *,
        exchanges_requests: bool = False,
        decode_budget: int | None = None,
    ) -> None:
        self.llm = llm
        self.cache = cache
        self.strategy = strategy
        self.renderer = renderer or llm.renderer
        self.adapters = Adapters()
        self.background = BackgroundFills(llm, cache)
        self._prefetches = Prefetches(cache)
        self._grammars = Grammars(llm)
        self.exchanges_requests = exchanges_requests
        self.decode_budget = decode_budget
        self.is_stopping = False
        self._had_died = False
        self._num_answering = 0
        self._position_limit = limit_of(llm.model_config)
        self._is_traced = bool(llm.vllm_config.observability_config.otlp_traces_endpoint)

    def __getattr__(self, name: str) -> Any:
        """Everything else of vLLM's ``EngineClient`` is ``AsyncLLM``'s."""
        return getattr(self.llm, name)

    def generate(self, prompt: Any, sampling_params: SamplingParams, request_id: str, **kwargs: Any) -> Outputs:
        """vLLM's ``generate``. A prompt that carries a :class:`ChunkedRequest` runs through the chunk cache."""
        if (progress := PROGRESS.get()) is not None:
            progress.is_servers = True
        try:
            return self._generate(prompt, sampling_params, request_id, kwargs)
        except Exception as error:
            raise blamed(error) from None

    def _generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, kwargs: dict[str, Any]
    ) -> Outputs:
        request = prompt.pop(REQUEST_KEY, None) if isinstance(prompt, dict) else None
        _refuse_foreign_params(sampling_params, has_cache=self._has_cache)
        if request is not None:
            self._refuse_if_full()  # vLLM-Ascend's vLLM asks for no admission
        self._refuse_too_many_answers(sampling_params.n)
        _refuse_long_integers(sampling_params)
        caller = CALLER.get()
        if caller is not None and is_given_away(transfer_params(sampling_params)):
            caller = None  # charged over there
        if caller is not None:
            _begin(caller.spending, prompt, request, sampling_params.n)
        call = EngineCall(self.llm, prompt, sampling_params, request_id, kwargs, self._position_limit)
        outputs = self._ordinary(call) if request is None else self._run(request, call)
        if sampling_params.structured_outputs is not None:
            outputs = self._grammars.structured(outputs, sampling_params.structured_outputs)
        if sampling_params.logprobs is not None or sampling_params.prompt_logprobs is not None:
            outputs = self._within_logprobs(outputs, call)
        if caller is None:
            return outputs
        are_deltas = sampling_params.output_kind is RequestOutputKind.DELTA
        return charged(outputs, caller.spending, sampling_params.n, are_deltas=are_deltas)

    def _within_logprobs(self, outputs: Outputs, call: EngineCall) -> Outputs:
        allowed = self.llm.model_config.max_logprobs
        if allowed < 0 or _BEAM in call.request_id:  # an administrator wants no limit, or none is written
            return outputs
        num_tokens = len(call.prompt.get("prompt_token_ids") or ()) if isinstance(call.prompt, dict) else 0
        return within_logprobs(outputs, call.params, num_tokens, allowed)

    def resolve(
        self,
        request: ChunkedRequest,
        params: SamplingParams,
        lora_request: "LoRARequest | None",
    ) -> ResolvedRequest:
        """Decides everything about a request before its segments are placed.

        That needs no look at the cache, unless documents were found in a prompt: then the scope in which more tokens of
        them are cached is theirs; else ``isolated``, as the text before them may be another next time.
        """
        resolved = resolve(request, self.adapters, params, lora_request)
        if not request.ticket.leaves_scope or resolved.prompt is None:
            return resolved
        behind = resolved.behind_system()
        if resolved.prompt.opening is None or self._num_cached(behind) > self._num_cached(resolved):
            return behind
        return resolved

    def _num_cached(self, request: ResolvedRequest) -> int:
        """How many tokens of its chunks are in the pool."""
        if isinstance(self.cache, CacheOff) or request.prompt is None:
            return 0
        found = self.cache.manager.look_up(request.prompt, request.scope)
        return sum(each.num_tokens for each in found.segments if each.entry is not None and not each.is_system)

    def prefetch(self, request: ResolvedRequest) -> int:
        """See :meth:`engine_ext.client.prefetch.Prefetches.start`. Raises :class:`LimitsError`."""
        self._refuse_if_full()
        if (caller := CALLER.get()) is not None and request.prompt is not None:
            caller.spending.begin(_num_charged(request.prompt.token_ids, request.prompt), 0)
        return self._prefetches.start(request)

    def _run(self, request: ChunkedRequest, call: EngineCall) -> Outputs:
        span = None
        if self._is_traced:
            span = start_request(call.kwargs.get("trace_headers"), call.prompt.get("arrival_time"))
            call = replace(call, kwargs={**call.kwargs, "trace_headers": span.headers})
        resolved = self.resolve(request, call.params, call.lora_request)
        handover, call = self._handed_over(call)
        return Answer(self.cache, resolved, request.ticket, call, span).outputs(handover)

    def _ordinary(self, call: EngineCall) -> Outputs:
        """An ordinary prompt, which finds its caller's namespace only, in memory and in tiers."""
        prompt: Any = call.prompt
        if not isinstance(prompt, dict) and CALLER.get() is None:
            return call.send(prompt, call.params)
        namespace = salted_namespace(own_namespace(None), prompt.get("cache_salt"))
        scope = CacheScope(namespace, self.adapters.name(call.lora_request) if call.lora_request is not None else "")
        num_tokens = len(prompt.get("prompt_token_ids") or ())
        hasher, prefixes = self.cache.hasher, self.cache.prefixes
        added = prefixes.params(scope, num_tokens) if prefixes is not None else {}
        call = call.within_positions(num_tokens)
        prompt = call.with_salt(plain_salt(hasher, scope))
        if not transfer_params(call.params):
            return call.send(prompt, with_transfer_params(call.params, added))
        handover, call = self._handed_over(call)
        form = KVForm("full", "copy", scope_salt(hasher, scope), self.cache.block_order, prompt, added, num_tokens)
        return ordinary_outputs(call, form, handover, self.cache.metrics)

    def _handed_over(self, call: EngineCall) -> tuple[HandedOver | None, EngineCall]:
        """The KV that another engine has for the request, and the call without it."""
        given = transfer_params(call.params)
        if not given or (not self._has_cache and HANDOVER_KEY not in given):
            return None, call  # without a cache like vLLM's own servers
        handover = HandedOver.of(call.params, is_readable=self.exchanges_requests)
        return handover, replace(call, params=without_transfer_params(call.params)) if handover else call

    @property
    def _has_cache(self) -> bool:
        return not isinstance(self.cache, CacheOff)

    async def notify_kv_transfer_request_rejected(
        self, request_id: str, kv_transfer_params: dict[str, Any], **kwargs: Any
    ) -> None:
        """vLLM's hook for prefill/decode splits, fed from client input; refused like a request with it."""
        is_allowed = IS_PEER.get() or not (self._has_cache or CALLER.get())
        if is_allowed and not _RESERVED & kv_transfer_params.keys():
            await self.llm.notify_kv_transfer_request_rejected(request_id, kv_transfer_params, **kwargs)

    @contextmanager
    def answering(self) -> Iterator[None]:
        """A request that :meth:`shutdown` waits for."""
        self._num_answering += 1
        try:
            yield
        finally:
            self._num_answering -= 1

    def shutdown(self, timeout: float | None = None) -> None:
        """vLLM's; blocks, in a thread of its own, until work has ended or ``timeout`` seconds have passed.

        Work is requests under way with their fills, and segments still to be exported to lasting tiers.
        """
        self._had_died = self.has_died
        self.is_stopping = True
        self.background.stop()
        deadline = time.monotonic() + (timeout or 0)
        while (left := deadline - time.monotonic()) > 0 and self._is_wanted:
            time.sleep(min(left, _POLL_S))
        if self._num_answering:
            logger.warning("stopping before %d requests were answered (--shutdown-timeout)", self._num_answering)
        if number := self.cache.num_to_store:
            logger.warning("stopping before %d segments were stored in tiers (--shutdown-timeout)", number)
        self._grammars.close()
        self.llm.shutdown(None if timeout is None else max(0.0, left))

    @property
    def _is_wanted(self) -> bool:
        return not self.llm.errored and bool(self._num_answering or self.cache.num_to_store)

    @property
    def has_died(self) -> bool:
        """Whether the engine's processes have ended unasked."""
        return self._had_died if self.is_stopping else bool(self.llm.errored)

    async def check_health(self) -> None:
        """vLLM's, for ``GET /health``; a stopping server is not healthy, so that load balancers avoid it."""
        if self.is_stopping:
            raise EngineDeadError
        await self.llm.check_health()

    async def reset_prefix_cache(self, reset_running_requests: bool = False, *args: Any, **kwargs: Any) -> bool:
        """vLLM's reset, which invalidates all earlier KV; it empties the chunk cache too.

        With ``reset_running_requests`` vLLM computes running requests again. Requests that would load their earlier
        chunks again fail; in place, also requests that would share these blocks.
        """
        if reset_running_requests and self._has_cache:
            await self.llm.collective_rpc("chunk_cache_forget")
        # Afterwards: until the reset is done, fills may be computed behind earlier blocks.
        async with self._forgetting_everything(Removal.RESET, with_new_weights=True):
            return bool(await self.llm.reset_prefix_cache(reset_running_requests, *args, **kwargs))

    async def add_lora(self, lora_request: "LoRARequest") -> bool:
        """vLLM's; earlier KV is not reused behind reloaded weights."""
        return await self.adapters.load(lora_request, self.llm.add_lora)

    async def sleep(self, level: int = 1, *args: Any, **kwargs: Any) -> None:
        """vLLM's sleep mode discards KV, from level 2 on also weights; empties the chunk cache."""
        async with self._forgetting_everything(Removal.ASLEEP, with_new_weights=level > 1):
            await self.llm.sleep(level, *args, **kwargs)

    async def release_kv_cache_memory(self) -> None:
        """vLLM's; it discards KV. Empties the chunk cache."""
        async with self._forgetting_everything(Removal.ASLEEP, with_new_weights=False):
            await self.llm.release_kv_cache_memory()

    async def pause_generation(self, *, clear_cache: bool = True, **kwargs: Any) -> None:
        """vLLM's pause for an update of the weights; empties the chunk cache if it clears vLLM's."""
        async with self._forgetting_everything(Removal.RESET, with_new_weights=True) if clear_cache else nullcontext():
            await self.llm.pause_generation(clear_cache=clear_cache, **kwargs)

    async def update_weights(self, *args: Any, **kwargs: Any) -> None:
        """vLLM's update of weights; then empties the chunk cache."""
        async with self._forgetting_everything(Removal.RESET, with_new_weights=True):
            await self.llm.update_weights(*args, **kwargs)

    async def finish_weight_update(self, *args: Any, **kwargs: Any) -> None:
        """vLLM's end of an update; empties the chunk cache."""
        async with self._forgetting_everything(Removal.RESET, with_new_weights=True):
            await self.llm.finish_weight_update(*args, **kwargs)

    @asynccontextmanager
    async def _forgetting_everything(self, why: Removal, *, with_new_weights: bool) -> AsyncIterator[None]:
        """Empties the chunk cache at the end, also after an exception.

        With new weights, storing and sharing stop at the beginning.
        """
        if with_new_weights:
            await self.cache.stop_sharing()
        try:
            yield
        finally:
            self.cache.clear(why=why)

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """vLLM's check before it accepts a request; also refuses (status 503) while too many fills wait."""
        self._refuse_if_full()
        self.llm.check_admission(n, request_id)

    def _refuse_too_many_answers(self, number: int) -> None:
        """Those that can't run at once would keep everybody else waiting."""
        most = self.llm.vllm_config.scheduler_config.max_num_seqs
        if number > most:
            raise GracefulHTTPError(f"n is {number}, but at most {most} answers run at once", HTTPStatus.BAD_REQUEST)

    def _refuse_if_full(self) -> None:
        if self.cache.is_crowded(owner()):
            message = "too many chunks wait to be computed; try again later"
            raise GracefulHTTPError(message, HTTPStatus.SERVICE_UNAVAILABLE)


def _begin(spending: Spending, prompt: Any, request: ChunkedRequest | None, num_answers: int) -> None:
    chunked = request.prompt if request is not None else None
    num_tokens = _num_charged(prompt.get("prompt_token_ids") or (), chunked)
    try:
        spending.begin(num_tokens, num_answers)
    except LimitsError as error:
        raise GracefulHTTPError(str(error), HTTPStatus.TOO_MANY_REQUESTS) from None


def _num_charged(token_ids: Sequence[int], prompt: ChunkedPrompt | None) -> int:
    """Tokens that a tenant pays for: also the text that its chunks are computed behind."""
    return len(token_ids) + (prompt.num_context_of_chunks if prompt is not None else 0)


def _refuse_long_integers(params: SamplingParams) -> None:
    """vLLM reads integers of any length from text, which can't be sent to its engine."""
    with suppress(TypeError):  # what only vLLM's encoder knows has no integers
        try:
            msgspec.msgpack.encode(params)
        except OverflowError:
            raise VLLMValidationError("a sampling parameter is an integer of more than 64 bits") from None


def _refuse_foreign_params(params: Any, *, has_cache: bool) -> None:
    """Refuses ``kv_transfer_params`` that could name others' KV.

    The chunk cache's own are nobody's; others' are peers', and anybody's on a server like vLLM's own: without chunk
    cache and keys.
    """
    given = transfer_params(params)
    if reserved := _RESERVED & given.keys():
        raise VLLMValidationError(
            f"{min(reserved)} in kv_transfer_params is reserved for the chunk cache", parameter="kv_transfer_params"
        )
    if given and not IS_PEER.get() and (has_cache or CALLER.get() is not None):
        message = "kv_transfer_params may name KV of other requests: only peers may send them (--peer-secret)"
        raise GracefulHTTPError(message, HTTPStatus.FORBIDDEN)
