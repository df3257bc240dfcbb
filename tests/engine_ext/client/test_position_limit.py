# SPDX-License-Identifier: Apache-2.0
"""Trained positions of a model whose engine takes longer prompts."""

from types import SimpleNamespace

import pytest
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams

from engine_ext.client.position_limit import limit_of, within_positions


def model(trained, limit):
    return SimpleNamespace(max_model_len=limit, hf_config=SimpleNamespace(tessera_trained_positions=trained))


@pytest.mark.parametrize(("asked", "allowed"), [(None, 12), (100, 12), (12, 12), (5, 5)])
def test_answers_end_within_the_trained_positions(asked, allowed):
    params = SamplingParams(max_tokens=asked, min_tokens=3)
    found = within_positions(512, 500, params)
    assert (found.max_tokens, found.min_tokens) == (allowed, 3)
    assert params.max_tokens == asked


def test_fewer_tokens_than_the_least_number():
    found = within_positions(512, 510, SamplingParams(max_tokens=9, min_tokens=9))
    assert (found.max_tokens, found.min_tokens) == (2, 2)


def test_prompts_beyond_the_trained_positions_are_refused():
    with pytest.raises(VLLMValidationError, match="spans 512 positions, and the model was trained for 512"):
        within_positions(512, 512, SamplingParams())


def test_nothing_changes_without_longer_prompts():
    assert limit_of(model(512, 512)) is None  # vLLM refuses them
    assert limit_of(model(512, 4096)) == 512
