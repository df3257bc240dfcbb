# SPDX-License-Identifier: Apache-2.0
"""An engine for longer prompts than its model was trained for."""

from contextlib import nullcontext

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams

from app.models.random_model import build_random_model
from engine_ext.client.position_limit import limit_of, longest_chunk, trained_positions, window_of, within_positions
from engine_ext.start.positions import extend_positions
from engine_ext.start.support import UnsupportedFlagError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


def arguments(folder, limit, **fields):
    model = build_random_model(folder / f"model-{fields}", max_position_embeddings=512, **fields)
    return AsyncEngineArgs(str(model), max_model_len=limit, dtype="float32")


def test_longer_prompts_than_the_model_was_trained_for(folder, monkeypatch):
    monkeypatch.delenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", raising=False)
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "0")  # restored at the end
    extended = arguments(folder, 4096)
    extend_positions(extended)
    model = extended.create_model_config()
    assert (model.max_model_len, model.hf_config.max_position_embeddings) == (4096, 4096)
    assert (trained_positions(model), window_of(model), longest_chunk(model), limit_of(model)) == (512, 256, 256, 512)


@pytest.mark.parametrize("limit", [None, 512, 100])
def test_models_keep_their_own_length_otherwise(folder, limit):
    same = arguments(folder, limit)
    extend_positions(same)
    assert (same.max_model_len, same.hf_overrides) == (limit, {})
    model = same.create_model_config()
    assert trained_positions(model) == longest_chunk(model) == model.max_model_len == (limit or 512)
    assert limit_of(model) is None  # vLLM refuses longer prompts


def test_scaled_positions_are_refused(folder):
    scaled = arguments(folder, 4096, rope_scaling={"rope_type": "linear", "factor": 2.0})
    with pytest.raises(UnsupportedFlagError, match=r"1024 positions .* not a plain one"):
        extend_positions(scaled)


@pytest.mark.parametrize(("method", "refused"), [("eagle", True), ("draft_model", True), ("ngram", False)])
def test_draft_models_are_refused(method, refused, folder, monkeypatch):
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "0")
    drafting = arguments(folder, 4096)
    drafting.speculative_config = {"method": method, "num_speculative_tokens": 2}
    with pytest.raises(UnsupportedFlagError, match="a draft model") if refused else nullcontext():
        extend_positions(drafting)


@pytest.mark.parametrize(
    ("num_prompt", "most", "least", "allowed"),
    [(500, None, 3, (12, 3)), (500, 100, 3, (12, 3)), (500, 12, 3, (12, 3)), (500, 5, 3, (5, 3)), (510, 9, 9, (2, 2))],
)
def test_answers_end_within_the_trained_positions(num_prompt, most, least, allowed):
    params = SamplingParams(max_tokens=most, min_tokens=least)
    found = within_positions(512, num_prompt, params)
    assert (found.max_tokens, found.min_tokens) == allowed
    assert params.max_tokens == most
    with pytest.raises(VLLMValidationError, match="spans 512 positions, and the model was trained for 512"):
        within_positions(512, 512, params)
