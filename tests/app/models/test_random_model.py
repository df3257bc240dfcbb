# SPDX-License-Identifier: Apache-2.0
"""Random models are built once, load in transformers, and have a lossless tokenizer."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from app.models.random_model import build_preset, build_random_model, default_model_dir
from app.models.random_tokenizer import SPECIAL_TOKENS

SHAPE = {"hidden_size": 32, "num_layers": 1, "head_dim": 16, "intermediate_size": 32}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build_random_model(tmp_path_factory.mktemp("random") / "model", **SHAPE)


@pytest.fixture(scope="module")
def tokenizer(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def test_answers_depend_on_the_prompt_and_are_no_ties(tmp_path):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(build_preset("tiny-llama", tmp_path / "m")).eval()
    prompts = torch.randint(4, 260, (16, 50), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        scores = model(prompts).logits[:, -1].log_softmax(-1)
    best = scores.topk(2).values
    assert len(set(scores.argmax(-1).tolist())) >= 8
    assert float((best[:, 0] - best[:, 1]).median()) > 0.2
    printable = scores.argmax(-1) - len(SPECIAL_TOKENS)
    assert int(printable.min()) >= 0
    assert int(printable.max()) < 94


def test_a_finished_folder_is_reused_and_another_spec_replaces_it(tmp_path):
    torch.manual_seed(5)
    state = torch.get_rng_state()
    path = build_random_model(tmp_path / "model", **SHAPE)
    assert torch.equal(torch.get_rng_state(), state)  # the caller's random numbers are left alone
    file = path / "model.safetensors"
    weights, before = file.read_bytes(), file.stat()
    assert build_random_model(tmp_path / "model", **SHAPE) == path
    assert file.stat().st_mtime_ns == before.st_mtime_ns
    build_random_model(path, **SHAPE, seed=1)
    assert file.read_bytes() != weights
    build_random_model(path, **SHAPE, seed=0)
    assert file.read_bytes() == weights
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]


def test_an_interrupted_build_leaves_nothing_behind(tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("app.models.random_model._save_model", interrupted)
    with pytest.raises(KeyboardInterrupt):
        build_random_model(tmp_path / "model", **SHAPE)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_something_else_is_not_overwritten(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="is in use: it has no"):
        build_random_model(tmp_path, **SHAPE)
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("fields", [{"num_heads": 3}, {"dtype": "int8"}, {"architecture": "gpt"}])
def test_impossible_specs_are_refused(fields, tmp_path):
    with pytest.raises(ValueError, match=r"must be|can't share"):
        build_random_model(tmp_path / "model", **fields)


def test_variants_and_yarn(tmp_path, monkeypatch):
    from transformers import AutoConfig

    monkeypatch.setenv("TESSERA_HOME", str(tmp_path))
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
    path = build_preset("tiny-qwen3", **SHAPE, dtype="bfloat16", rope_scaling=yarn)
    assert path.parent == default_model_dir() == tmp_path / "models"
    assert path.name.startswith("tiny-qwen3-")  # never in the preset's own folder
    config = AutoConfig.from_pretrained(path)
    assert (config.model_type, config.rope_parameters["rope_type"], config.dtype) == ("qwen3", "yarn", torch.bfloat16)


@given(st.text())
@settings(derandomize=True, deadline=None)
def test_tokenizer_gives_one_token_per_byte_and_loses_nothing(tokenizer, text):
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
    assert tokenizer(text)["input_ids"] == ids  # no tokens are added around it
