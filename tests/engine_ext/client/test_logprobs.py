# SPDX-License-Identifier: Apache-2.0
"""A response has no more log probabilities than vLLM can write without keeping others waiting."""

from types import SimpleNamespace

import pytest
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RequestOutputKind, SamplingParams

from engine_ext.client.logprobs import within_logprobs
from engine_ext.client.request import PROGRESS, Progress
from tests.support.variables import having

ALLOWED = 19
FINAL, DELTA = RequestOutputKind.FINAL_ONLY, RequestOutputKind.DELTA


async def outputs(num_tokens, width):
    """One output with an answer of so many tokens."""
    answer = SimpleNamespace(logprobs=[dict.fromkeys(range(width), 0.0)] * num_tokens)
    yield SimpleNamespace(finished=True, outputs=[answer])


async def answered(num_tokens, width, num_prompt_tokens=10, **params) -> int:
    params = SamplingParams(**{"output_kind": FINAL, "max_tokens": 5000, **params})
    return len([each async for each in within_logprobs(outputs(num_tokens, width), params, num_prompt_tokens, ALLOWED)])


@pytest.mark.parametrize(
    "asked",
    [
        {"num_tokens": 200, "width": 20, "logprobs": 9},
        {"num_tokens": 5000, "width": 20, "logprobs": 9, "output_kind": DELTA},
        {"num_tokens": 1, "width": 0, "prompt_logprobs": 1, "num_prompt_tokens": 2000},
    ],
)
async def test_few_and_streamed_ones_pass(asked):
    assert await answered(**asked) == 1


@pytest.mark.parametrize(
    ("asked", "parameter"),
    [
        ({"num_tokens": 201, "width": 20, "logprobs": 9}, "logprobs"),
        ({"num_tokens": 1, "width": 1, "prompt_logprobs": 1, "num_prompt_tokens": 2001}, "prompt_logprobs"),
        (
            {"num_tokens": 1, "width": 1, "prompt_logprobs": 1, "num_prompt_tokens": 2001, "output_kind": DELTA},
            "prompt_logprobs",
        ),
    ],
)
async def test_too_many_are_refused(asked, parameter):
    with pytest.raises(VLLMValidationError, match="at most 4000 log probabilities") as refused:
        await answered(**asked)
    assert refused.value.parameter == parameter


async def test_those_of_all_prompts_of_a_response_count():
    with having(PROGRESS, Progress()):
        await answered(150, 20, logprobs=9)
        with pytest.raises(VLLMValidationError):
            await answered(150, 20, logprobs=9)
    await answered(150, 20, logprobs=9)


async def test_answers_at_once_have_few_each():
    await answered(1, 10, logprobs=19, n=50)
    with pytest.raises(VLLMValidationError, match="at most 1000 log probabilities at once"):
        await answered(1, 10, logprobs=19, n=51)
    with having(PROGRESS, Progress()):
        for _ in range(50):
            await answered(1, 1, logprobs=19, output_kind=DELTA)
        with pytest.raises(VLLMValidationError, match="at once"):
            await answered(1, 1, logprobs=19, output_kind=DELTA)
