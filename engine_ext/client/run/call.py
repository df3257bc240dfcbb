# SPDX-License-Identifier: Apache-2.0
"""One call of vLLM's ``generate``."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from engine_ext.client.tracing import TraceHeaders
from engine_ext.wire.position_limit import within_positions
from engine_ext.wire.request import Outputs

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

_FILL_KWARGS = ("lora_request", "priority", "data_parallel_rank")


@dataclass(frozen=True, slots=True)
class EngineCall:
    """A call as vLLM's serving layer made it."""

    llm: AsyncLLM
    prompt: dict[str, Any]
    params: SamplingParams
    request_id: str
    kwargs: Mapping[str, Any]

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

    async def take_scores(self, probe: int) -> Sequence[list[float] | None]:
        """Each worker's scores of a probe (:meth:`engine_ext.core.attention.probes.Probes.take`)."""
        scores: Sequence[list[float] | None] = await self.llm.collective_rpc("chunk_cache_take_scores", args=(probe,))
        return scores

    def generate(self, prompt: dict[str, Any], params: SamplingParams) -> Outputs:
        """The same call with another prompt and other parameters."""
        outputs: Outputs = self.llm.generate(prompt, params, self.request_id, **self.kwargs)
        return outputs

    def within_positions(self, reach: int) -> "EngineCall":
        """The call with an answer within the trained positions (:mod:`engine_ext.wire.position_limit`)."""
        return replace(self, params=within_positions(self.llm.model_config, reach, self.params))

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

    def fill_kwargs(self, trace_headers: TraceHeaders) -> dict[str, Any]:
        """Keyword arguments of the fill and link requests of this call."""
        kwargs = {name: self.kwargs[name] for name in _FILL_KWARGS if self.kwargs.get(name) is not None}
        return {**kwargs, "trace_headers": trace_headers}


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
