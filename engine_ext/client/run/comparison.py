# SPDX-License-Identifier: Apache-2.0
"""Full attention's answer beside the answer over cached chunks, and the distance of their predictions."""

import secrets
import time
from collections.abc import Mapping
from contextlib import aclosing
from typing import Any

from vllm.config import ModelConfig
from vllm.exceptions import VLLMValidationError
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams

from cache.report import Compared, ComparedTimes
from engine_ext.client.run.call import EngineCall
from engine_ext.wire.plan import Composition, TransferPlan
from engine_ext.wire.request import Outputs
from tools.divergence import TOP, kl_divergence


class Comparison:
    """Records an answer over cached chunks as it comes; then full attention answers, and judges that answer."""

    def __init__(self, call: EngineCall, model: ModelConfig, block_tokens: int | None) -> None:
        """``block_tokens`` is the block size of vLLM's prefix cache, if it is on.

        Raises ``VLLMValidationError`` if nothing could be compared.
        """
        params = call.params
        most = model.max_logprobs if model.max_logprobs >= 0 else model.get_vocab_size()
        if params.n != 1:
            raise VLLMValidationError("cache.mode compare needs n = 1", parameter="n", value=params.n)
        if most < 1 or model.logprobs_mode != "raw_logprobs":
            raise VLLMValidationError(
                "cache.mode compare needs a server with --max-logprobs 1 or more and --logprobs-mode raw_logprobs",
                parameter="cache.mode",
                value="compare",
            )
        self._call = call
        self._block_tokens = block_tokens
        self._wants_logprobs = params.logprobs is not None
        self.params = params.clone()
        """Sampling parameters of the answer over cached chunks."""
        if not self._wants_logprobs or 0 <= params.logprobs < min(TOP, most):
            self.params.logprobs = min(TOP, most)
        self._token_ids: list[int] = []
        self._logprobs: list[Mapping[int, Any]] = []

    @classmethod
    def of_call(cls, call: EngineCall) -> "Comparison":
        """A comparison for ``call``, whose engine knows the model."""
        cache = call.llm.vllm_config.cache_config
        return cls(call, call.llm.model_config, cache.block_size if cache.enable_prefix_caching else None)

    def note(self, output: RequestOutput) -> None:
        """Records an output, and removes log probabilities that the request didn't ask for."""
        (completion,) = output.outputs
        if self.params.output_kind is not RequestOutputKind.DELTA:
            self._token_ids, self._logprobs = [], []
        self._token_ids += completion.token_ids
        self._logprobs += completion.logprobs or []
        if not self._wants_logprobs:
            completion.logprobs = None

    async def with_full(self, prompt: dict[str, Any], timings_ms: Mapping[str, float]) -> Compared:
        """The report's ``compare``; ``prompt`` is for full attention, ``timings_ms`` are the cached answer's."""
        answer, full_ms = await self._answer(prompt)
        judged = await self._judged(prompt)
        divergences = [
            kl_divergence(_floats(full), _floats(cached)) for full, cached in zip(judged, self._logprobs, strict=True)
        ]
        return Compared(
            answer=answer.outputs[0].text,
            same_tokens=list(answer.outputs[0].token_ids) == self._token_ids,
            mean_kl=sum(divergences) / len(divergences),
            tokens=len(divergences),
            top_logprobs=self.params.logprobs,
            timings_ms=ComparedTimes(cached={name: timings_ms[name] for name in full_ms}, full=full_ms),
        )

    def _run(self, name: str, prompt: dict[str, Any], params: SamplingParams) -> Outputs:
        return self._call.generate(prompt, params, f"{self._call.request_id}-{name}")

    async def _answer(self, prompt: dict[str, Any]) -> tuple[RequestOutput, dict[str, float]]:
        """Full attention's own answer, with the same parameters, and its times."""
        params = self.params.clone()
        params.output_kind = RequestOutputKind.CUMULATIVE
        started = time.perf_counter()
        async with aclosing(self._run("full", prompt, params)) as outputs:
            answer = await anext(outputs)
            first = time.perf_counter() - started
            async for later in outputs:  # none is kept: each has the whole text up to there
                answer = later
        return answer, {"first_token": first * 1e3, "total": (time.perf_counter() - started) * 1e3}

    async def _judged(self, prompt: dict[str, Any]) -> list[Mapping[int, Any]]:
        """Log probabilities of the cached answer's tokens in full attention, mostly as a prompt.

        The prompt's own log probabilities are not needed, so its tokens in vLLM's prefix cache are not computed again.
        All later tokens are: cached tokens have no log probabilities.
        """
        params = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            logprobs=self.params.logprobs,
            prompt_logprobs=self.params.logprobs,
            skip_reading_prefix_cache=False,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        prompt_ids, others = prompt["prompt_token_ids"], self._token_ids[:-1]
        judged = {**prompt, "prompt_token_ids": [*prompt_ids, *others]}
        if self._block_tokens is not None:
            known = (len(prompt_ids) - 1) // self._block_tokens * self._block_tokens
            plan = TransferPlan(composition=Composition((known,), prompt.get("cache_salt")))
            params.extra_args = {"kv_transfer_params": plan.to_params()}
            judged["cache_salt"] = secrets.token_hex(16)  # no other request has blocks behind the known ones
        async with aclosing(self._run("judge", judged, params)) as outputs:
            (output,) = [output async for output in outputs]
        of_prompt, of_last = output.prompt_logprobs, output.outputs[0].logprobs
        assert of_prompt is not None
        assert of_last is not None
        # From the end: tokens that were not computed have none.
        return [*of_prompt[len(of_prompt) - len(others) :], *of_last]


def _floats(logprobs: Mapping[int, Any]) -> dict[int, float]:
    """Of vLLM's ``Logprob`` by token."""
    return {token: each.logprob for token, each in logprobs.items()}
