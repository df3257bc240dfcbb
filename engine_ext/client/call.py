# SPDX-License-Identifier: Apache-2.0
"""One call of vLLM's ``generate``: its arguments, the KV that it needs, and the times of its stages."""

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from cache.positions.layout import PlacementName
from engine_ext.client.position_limit import within_positions
from engine_ext.client.request import Outputs
from engine_ext.client.tracing import TraceHeaders, TraceSpan
from engine_ext.wire.handover import Mode

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

    from engine_ext.core.attention.probes import Measured

_MOST_BEGUN = 16
"""Requests that begin in one turn of the event loop."""
_FILL_KWARGS = ("lora_request", "priority", "data_parallel_rank")


@dataclass(frozen=True, slots=True)
class KVForm:
    """A prompt's KV as this engine computes or composes it.

    ``prompt`` has the cache salt, ``added`` are ``kv_transfer_params`` of this project's connectors. ``layout_salt``
    names the form in all engines, ``block_order`` the memory order of this one's blocks. ``reach`` is the largest
    distance in positions within the prompt.
    """

    mode: Mode
    placement: PlacementName
    layout_salt: str
    block_order: str
    prompt: dict[str, Any]
    added: Mapping[str, Any]
    reach: int


class Stages:
    """The stages of one request, timed for its report, and traced below ``span`` if it is traced.

    ``trace_headers`` make vLLM's spans children of the request's.
    """

    def __init__(self, trace_headers: TraceHeaders = None, span: TraceSpan | None = None) -> None:
        self.timings_ms: dict[str, float] = {"plan": 0.0, "fill": 0.0}
        self._trace_headers = trace_headers
        self._span = span
        self._started = time.perf_counter()

    @contextmanager
    def stage(self, name: str, **attributes: int) -> Iterator[TraceHeaders]:
        """Times a stage and yields its trace headers; a repeated name overwrites the earlier time."""
        started = time.perf_counter()
        try:
            if self._span is None:
                yield self._trace_headers
            else:
                with self._span.child(f"tessera.{name}") as span:
                    span.describe(attributes)
                    yield span.headers
        finally:
            self.timings_ms[name] = (time.perf_counter() - started) * 1e3

    def elapsed_ms(self) -> float:
        """Time since the request was received."""
        return (time.perf_counter() - self._started) * 1e3


@dataclass(frozen=True, slots=True)
class EngineCall:
    """A call as vLLM's serving layer made it.

    ``position_limit``: the positions that the model was trained for, if prompts may exceed them.
    """

    llm: AsyncLLM
    prompt: dict[str, Any]
    params: SamplingParams
    request_id: str
    kwargs: Mapping[str, Any]
    position_limit: int | None = None

    @property
    def lora_request(self) -> "LoRARequest | None":
        """The request's LoRA adapter."""
        return self.kwargs.get("lora_request")

    @property
    def num_answers(self) -> int:
        """The number of answers asked for."""
        return int(self.params.n)

    async def release(self, address: Mapping[str, Any]) -> None:
        """Tells another engine that nobody will read its blocks at ``address``."""
        await self.llm.notify_kv_transfer_request_rejected(self.request_id, dict(address))

    async def take_attention(self, probe: int) -> "Sequence[Sequence[Measured]]":
        """The measurements of each worker in a probe (:meth:`engine_ext.core.attention.probes.Probes.take`)."""
        measured = await self.llm.collective_rpc("chunk_cache_take_attention", args=(probe,))
        return cast("Sequence[Sequence[Measured]]", measured)

    def generate(self, form: KVForm, address: Mapping[str, Any] = MappingProxyType({})) -> Outputs:
        """The call over KV of this form; ``address``: where another engine has it."""
        params = self.within_positions(form.reach).params
        return self.send(form.prompt, with_transfer_params(params, {**address, **form.added}))

    def send(self, prompt: dict[str, Any], params: SamplingParams) -> Outputs:
        """The same call with another prompt and other parameters."""
        return _begun(self.llm.generate(prompt, params, self.request_id, **self.kwargs))

    def within_positions(self, reach: int) -> "EngineCall":
        """The call with an answer within the trained positions (:mod:`engine_ext.client.position_limit`)."""
        if self.position_limit is None:
            return self
        return replace(self, params=within_positions(self.position_limit, reach, self.params))

    def with_salt(self, cache_salt: str | None) -> dict[str, Any]:
        """The prompt with this cache salt, if any."""
        return self.prompt if cache_salt is None else {**self.prompt, "cache_salt": cache_salt}

    def with_tokens(self, token_ids: list[int]) -> "EngineCall":
        """The call with a prompt of these tokens."""
        return replace(self, prompt={**self.prompt, "prompt_token_ids": token_ids})

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.prompt["prompt_token_ids"])

    def fill_kwargs(self, trace_headers: TraceHeaders = None) -> dict[str, Any]:
        """Keyword arguments of this call's requests for KV, and of its probes."""
        kwargs = {name: self.kwargs[name] for name in _FILL_KWARGS if self.kwargs.get(name) is not None}
        return {**kwargs, "trace_headers": trace_headers}


class _Begun:
    """Requests that have begun in this turn of the event loop."""

    number = 0

    @classmethod
    def reset(cls) -> None:
        cls.number = 0


async def _begun(outputs: Outputs) -> Outputs:
    """The outputs of a request that begins when few others do.

    vLLM begins the prompts of a list in one turn of the event loop, and each takes half a millisecond.
    """
    while _Begun.number >= _MOST_BEGUN:
        await asyncio.sleep(0)
    if not _Begun.number:
        asyncio.get_running_loop().call_soon(_Begun.reset)
    _Begun.number += 1
    async with aclosing(outputs):
        async for output in outputs:
            yield output


def is_error(output: RequestOutput) -> bool:
    """Whether the engine failed the request."""
    return any(completion.finish_reason == "error" for completion in output.outputs)


def transfer_params(params: Any) -> dict[str, Any]:
    """The request's ``kv_transfer_params``; empty without."""
    return (getattr(params, "extra_args", None) or {}).get("kv_transfer_params") or {}


def without_transfer_params(params: SamplingParams) -> SamplingParams:
    """A copy of sampling parameters without ``kv_transfer_params``."""
    params = params.clone()
    params.extra_args = {**(params.extra_args or {}), "kv_transfer_params": None}
    return params


def with_transfer_params(params: SamplingParams, added: Mapping[str, Any]) -> SamplingParams:
    """Sampling parameters with more ``kv_transfer_params``; a copy, since vLLM may use ``params`` again."""
    if not added:
        return params
    params = params.clone()
    extra = params.extra_args or {}
    params.extra_args = {**extra, "kv_transfer_params": {**transfer_params(params), **added}}
    return params
