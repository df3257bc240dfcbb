# SPDX-License-Identifier: Apache-2.0
"""The engine client that vLLM's serving layer talks to: ``AsyncLLM`` with the chunk cache around ``generate``."""

import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from cache.errors import CapacityError, IntegrityError
from cache.hashing import CacheScope, ChunkHash, ChunkHasher
from cache.holdings import Holdings
from cache.layout import BlockSharing, ChunkedPrompt, Layout, PositionReindexer, PositionStrategy
from cache.lease import Lease
from cache.manager import ChunkCacheManager, Removal
from cache.strategy import UNKNOWN, DefaultStrategy
from engine_ext.chunks.fills import FillRunner
from engine_ext.chunks.transfers import PoolTransfers
from engine_ext.client.adapters import Adapters
from engine_ext.client.background import BackgroundFills
from engine_ext.client.run import ChunkedRun
from engine_ext.wire.caller import CALLER, DEFAULT_NAMESPACE, charged
from engine_ext.wire.plan import PARAMS_KEY
from engine_ext.wire.request import REQUEST_KEY, CacheOptions, FullAttentionError, Outputs, PlacementName, cache_scope
from engine_ext.wire.vllm_compat import GracefulHTTPError

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

logger = logging.getLogger(__name__)

_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class FillLimits:
    """How many fill requests may be in the engine at once, and how many may wait for that."""

    max_running: int = 16
    max_queued: int = 1024


class ChunkEngine:
    """Runs requests with chunks from the chunk cache; passes everything else through to ``AsyncLLM``.

    ``manager`` is ``None`` when the cache is off; ``disabled_reason`` then says why. ``transfers`` is there if its KV
    may go to, and come from, other replicas. ``is_stopping`` tells that :meth:`shutdown` was called. ``num_answering``,
    which the app counts, is how many requests that is to wait for. ``sharing`` describes the blocks that requests share
    in place; ``None`` if they copy. ``strategy`` is that of requests that name none.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        manager: ChunkCacheManager | None,
        disabled_reason: str | None,
        limits: FillLimits,
        transfers: PoolTransfers | None = None,
        sharing: BlockSharing | None = None,
        strategy: DefaultStrategy = UNKNOWN,
    ) -> None:
        self.llm = llm
        self.manager = manager
        self.disabled_reason = disabled_reason
        self.limits = limits
        self.strategy = strategy
        self.transfers = transfers
        self.sharing = sharing
        self.is_stopping = False
        self.num_answering = 0
        self._had_died = False
        self.is_traced = bool(llm.vllm_config.observability_config.otlp_traces_endpoint)
        self.adapters = Adapters()
        self.holdings = manager.holdings if manager else Holdings(page_bytes=0)
        self.fills = FillRunner(llm, manager, self._check_if_idle, limits.max_running) if manager else None
        self.background = BackgroundFills(self) if manager else None
        # What vLLM's serving layer renders prompts with; the app puts its own around it.
        self.renderer: Any = llm.renderer
        self._hasher = manager.hasher if manager else ChunkHasher("", "sha256")
        self._reindexer = PositionReindexer(sharing)
        self._next_integrity_check = 0.0

    @property
    def placement(self) -> PlacementName:
        """How requests get their chunks: as configured, or copies where blocks can't be shared."""
        return "copy" if self.sharing is None else "in-place"

    def copy_chunks(self, reason: str) -> None:
        """From now on requests copy the chunks that they read."""
        logger.warning("chunks are copied, not shared in place: %s", reason)
        self.sharing = None
        self._reindexer = PositionReindexer()

    def __getattr__(self, name: str) -> Any:
        """Everything else of vLLM's ``EngineClient`` is ``AsyncLLM``'s."""
        return getattr(self.llm, name)

    def generate(self, prompt: Any, sampling_params: SamplingParams, request_id: str, **kwargs: Any) -> Outputs:
        """vLLM's ``generate``. A prompt that carries a :class:`ChunkedRequest` runs through the chunk cache."""
        request = prompt.pop(REQUEST_KEY, None) if isinstance(prompt, dict) else None
        _refuse_foreign_plan(sampling_params, any_params=self.manager is not None)
        outputs: Outputs
        if request is None:
            prompt = self._in_own_namespace(prompt, kwargs.get("lora_request"))
            outputs = self.llm.generate(prompt, sampling_params, request_id, **kwargs)
        else:
            self._refuse_if_full()  # before 0.29 vLLM asks for no admission
            outputs = ChunkedRun(self, request, prompt, sampling_params, request_id, kwargs).outputs()
        if (caller := CALLER.get()) is None:
            return outputs
        are_deltas = sampling_params.output_kind is RequestOutputKind.DELTA
        return charged(outputs, len(prompt.get("prompt_token_ids") or ()), caller, are_deltas=are_deltas)

    def _in_own_namespace(self, prompt: Any, lora_request: "LoRARequest | None") -> Any:
        """An ordinary prompt, for which vLLM's prefix cache finds what its caller's namespace has computed, no more."""
        if (caller := CALLER.get()) is None:
            return prompt
        salt = prompt.get("cache_salt")
        scope = cache_scope(CacheOptions(namespace=caller.namespace), salt, self.adapters.name(lora_request))
        return {**prompt, "cache_salt": self.plain_salt(scope, salt)}

    async def notify_kv_transfer_request_rejected(
        self, request_id: str, kv_transfer_params: dict[str, Any], **kwargs: Any
    ) -> None:
        """vLLM's hook for prefill/decode splits, fed from client input: with our connector there is no split."""
        if self.manager is None and PARAMS_KEY not in kv_transfer_params:
            await self.llm.notify_kv_transfer_request_rejected(request_id, kv_transfer_params, **kwargs)

    def shutdown(self, timeout: float | None = None) -> None:
        """vLLM's; it blocks, in a thread of its own, until all is done or ``timeout`` seconds have passed.

        All are requests under way, with the fills that they want, and what has yet to be stored in tiers.
        """
        self._had_died = self.has_died
        self.is_stopping = True
        deadline = time.monotonic() + (timeout or 0)
        while (left := deadline - time.monotonic()) > 0 and self._is_wanted:
            time.sleep(min(left, _POLL_S))
        if self.num_answering:
            logger.warning("stopping before %d requests were answered (--shutdown-timeout)", self.num_answering)
        if number := self._num_to_store:
            logger.warning("stopping before %d segments were stored in tiers (--shutdown-timeout)", number)
        self.llm.shutdown(None if timeout is None else max(0.0, left))

    @property
    def _is_wanted(self) -> bool:
        return not self.llm.errored and bool(self.num_answering or self._num_to_store)

    @property
    def _num_to_store(self) -> int:
        archive = self.fills.archive if self.fills is not None else None
        return archive.num_to_keep if archive is not None else 0

    @property
    def has_died(self) -> bool:
        """Whether the engine's processes have ended unasked."""
        return self._had_died if self.is_stopping else bool(self.llm.errored)

    async def check_health(self) -> None:
        """vLLM's, which ``GET /health`` asks; a server that stops is not healthy, so that balancers turn away."""
        if self.is_stopping:
            raise EngineDeadError
        await self.llm.check_health()

    async def reset_prefix_cache(self, reset_running_requests: bool = False, *args: Any, **kwargs: Any) -> bool:
        """vLLM's reset, which invalidates all earlier KV (for new weights, say): it empties the chunk cache too.

        With ``reset_running_requests`` vLLM computes running requests anew. Those that would load their chunks again
        fail, since these are of before; in place, others that were to share these blocks as well.
        """
        if reset_running_requests and self.manager is not None:
            await self.llm.collective_rpc("chunk_cache_forget")
        # Only then: until it is done, fills may be computed behind blocks of before.
        with self._forgetting_everything(Removal.RESET, with_new_weights=True):
            return bool(await self.llm.reset_prefix_cache(reset_running_requests, *args, **kwargs))

    async def add_lora(self, lora_request: "LoRARequest") -> bool:
        """vLLM's; behind weights that are loaded over others, nothing of before is reused."""
        return await self.adapters.load(lora_request, self.llm.add_lora)

    async def sleep(self, level: int = 1, *args: Any, **kwargs: Any) -> None:
        """vLLM's sleep mode discards KV, from level 2 on weights as well; the chunk cache is emptied with it."""
        with self._forgetting_everything(Removal.ASLEEP, with_new_weights=level > 1):
            await self.llm.sleep(level, *args, **kwargs)

    async def release_kv_cache_memory(self) -> None:
        """vLLM's; it discards KV, and the chunk cache is emptied with it."""
        with self._forgetting_everything(Removal.ASLEEP, with_new_weights=False):
            await self.llm.release_kv_cache_memory()

    async def pause_generation(self, *, clear_cache: bool = True, **kwargs: Any) -> None:
        """vLLM's pause for an update of the weights; the chunk cache is emptied where vLLM's own is."""
        with self._forgetting_everything(Removal.RESET, with_new_weights=True) if clear_cache else nullcontext():
            await self.llm.pause_generation(clear_cache=clear_cache, **kwargs)

    async def update_weights(self, *args: Any, **kwargs: Any) -> None:
        """vLLM's update of weights; the chunk cache is emptied of all that was computed until they were there."""
        with self._forgetting_everything(Removal.RESET, with_new_weights=True):
            await self.llm.update_weights(*args, **kwargs)

    async def finish_weight_update(self, *args: Any, **kwargs: Any) -> None:
        """vLLM's end of an update; it empties the chunk cache as well."""
        with self._forgetting_everything(Removal.RESET, with_new_weights=True):
            await self.llm.finish_weight_update(*args, **kwargs)

    @contextmanager
    def _forgetting_everything(self, why: Removal, *, with_new_weights: bool) -> Iterator[None]:
        """Empties the chunk cache at the end, come what may.

        With weights that may be others, nothing is stored or shared from the beginning on.
        """
        if with_new_weights and self.transfers is not None:
            logger.warning("chunks are no longer stored nor shared: the weights may have changed")
            self.transfers = None
        try:
            yield
        finally:
            if self.manager is not None:
                self.manager.clear(why=why)

    async def drop_from_tiers(self, keys: Iterable[ChunkHash]) -> None:
        """Segments that shall be kept nowhere any more."""
        if self.fills is not None and self.fills.archive is not None:
            await self.fills.archive.drop(keys)

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """vLLM's check before it accepts a request; also refuses (status 503) while too many fills wait."""
        self._refuse_if_full()
        self.llm.check_admission(n, request_id)

    def _refuse_if_full(self) -> None:
        if self.fills is not None and self.fills.num_queued >= self.limits.max_queued:
            message = "too many chunks wait to be computed; try again later"
            raise GracefulHTTPError(message, HTTPStatus.SERVICE_UNAVAILABLE)

    def layout(self, prompt: ChunkedPrompt, strategy: PositionStrategy) -> Layout:
        """Where each of the prompt's segments goes."""
        return self._reindexer.layout(prompt, strategy)

    def plain_salt(self, scope: CacheScope, cache_salt: str | None) -> str | None:
        """Salt of plain causal KV: in the default namespace the client's, as for what ordinary requests compute.

        vLLM tells adapters apart by name only, so what is computed behind one has a salt of its own.
        """
        if scope.namespace == DEFAULT_NAMESPACE and not scope.adapter:
            return cache_salt
        return self._hasher.layout_salt(scope, ["plain"])

    def acquire(self, prompt: ChunkedPrompt, layout: Layout, scope: CacheScope) -> Lease:
        """A lease on the prompt's segments; raises :class:`FullAttentionError` if there can be none."""
        if self.manager is None or self.disabled_reason:
            raise FullAttentionError("cache off", self.disabled_reason or "the chunk cache is off")
        try:
            with self.manager.metrics.plan_seconds.time():
                return self.manager.acquire(prompt, layout, scope)
        except CapacityError as error:
            raise FullAttentionError("capacity", str(error)) from error

    def release(self, lease: Lease) -> None:
        """Ends a lease, and aborts fills that nobody wants any more."""
        assert self.fills is not None
        self.fills.release(lease)
        self._check_if_idle()

    def _check_if_idle(self) -> None:
        """Checks the manager's books if nothing is under way, in at most a hundredth of the time."""
        assert self.manager is not None
        if time.monotonic() >= self._next_integrity_check and self.manager.is_idle:
            self.check_integrity()

    def check_integrity(self) -> None:
        """Checks the manager's books; if they are wrong, turns the cache off for good."""
        assert self.manager is not None
        started = time.monotonic()
        try:
            self.manager.check_integrity()
        except IntegrityError as error:
            self.disabled_reason = f"integrity check failed: {error}"
            logger.critical("chunk cache disabled: %s", self.disabled_reason)
        ended = time.monotonic()
        self._next_integrity_check = ended + max(1.0, 100 * (ended - started))


def _refuse_foreign_plan(params: Any, *, any_params: bool) -> None:
    """A client's plan could name pages that aren't its own, or break the connector (also when the cache is off).

    With the cache on, no other ``kv_transfer_params`` have a meaning either.
    """
    given = (getattr(params, "extra_args", None) or {}).get("kv_transfer_params")
    if given and (any_params or PARAMS_KEY in given):
        raise VLLMValidationError(
            "kv_transfer_params is reserved for the chunk cache on this server", parameter="kv_transfer_params"
        )
