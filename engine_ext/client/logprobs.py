# SPDX-License-Identifier: Apache-2.0
"""A bound of the log probabilities that a response has at once.

vLLM makes objects of them, then JSON, in one turn of its event loop each, ten to seventeen microseconds for one.
"""

from contextlib import aclosing
from typing import Final

from vllm.exceptions import VLLMValidationError
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams

from engine_ext.client.request import PROGRESS, Outputs, Progress

MOST_TOKENS: Final = 200
"""Of a response that have as many as ``--max-logprobs`` allows (20); of more tokens there may be fewer each."""

MOST_ANSWERS: Final = 50
"""That have as many of each token, at once."""


async def within_logprobs(outputs: Outputs, params: SamplingParams, num_prompt_tokens: int, allowed: int) -> Outputs:
    """Outputs of a request; raises :class:`VLLMValidationError` if its response would have too many of them.

    Those of its prompts count, and those of its answers unless they are streamed. What a prompt will have is known
    before. Answers are as long as they are: too many are known in the end. ``allowed``: of one token.
    """
    progress = PROGRESS.get() or Progress()
    most, most_at_once = MOST_TOKENS * (allowed + 1), MOST_ANSWERS * (allowed + 1)

    def count(number: int, parameter: str) -> None:
        progress.num_logprobs += number
        if progress.num_logprobs > most:
            message = f"a response has at most {most} log probabilities: ask for fewer, or stream the answer"
            raise VLLMValidationError(message, parameter=parameter)

    async with aclosing(outputs):
        if params.prompt_logprobs is not None:
            count(num_prompt_tokens * (params.prompt_logprobs + 1), "prompt_logprobs")
        if params.logprobs is not None:
            progress.num_logprobs_at_once += params.n * (params.logprobs + 1)
            if progress.num_logprobs_at_once > most_at_once:
                message = f"answers have at most {most_at_once} log probabilities at once: ask for fewer of each"
                raise VLLMValidationError(message, parameter="logprobs")
        async for output in outputs:
            if params.logprobs is not None and params.output_kind is not RequestOutputKind.DELTA and output.finished:
                count(_num_logprobs(output), "logprobs")
            yield output


def _num_logprobs(output: RequestOutput) -> int:
    return sum(len(each) for completion in output.outputs for each in completion.logprobs or ())
