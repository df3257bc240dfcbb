# SPDX-License-Identifier: Apache-2.0
"""Random models are built once, load in transformers, and have a lossless tokenizer."""

import json
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from app.models.random_model import (
    PRESETS,
    build_preset,
    build_random_model,
    default_model_dir,
    main,
    parameter_count,
)
from app.models.random_tokenizer import SPECIAL_TOKENS

SHAPE = {"hidden_size": 32, "num_layers": 1, "head_dim": 16, "intermediate_size": 32}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build_random_model(tmp_path_factory.mktemp("random") / "model", **SHAPE)


@pytest.fixture(scope="module")
def tokenizer(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("preset", [name for name in PRESETS if name.startswith("tiny")])
def test_presets_build_and_load(preset, tmp_path):
    from transformers import AutoModelForCausalLM

    path = build_preset(preset, tmp_path / preset)
    model = AutoModelForCausalLM.from_pretrained(path)
    spec = PRESETS[preset]
    assert model.config.model_type == spec.architecture
    assert model.dtype == torch.float32
    assert model.config.head_dim == spec.head_dim
    assert model.num_parameters() == parameter_count(spec)
    attention = model.model.layers[0].self_attn
    assert attention.k_proj.out_features == spec.num_kv_heads * spec.head_dim
    assert hasattr(attention, "q_norm") == (spec.architecture == "qwen3")


def test_the_benchmark_model_has_about_100_million_parameters():
    assert 95e6 < parameter_count(PRESETS["bench-100m"]) < 110e6


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
    path = build_random_model(tmp_path / "model", **SHAPE)
    before = (path / "model.safetensors").stat()
    assert build_random_model(tmp_path / "model", **SHAPE) == path
    assert (path / "model.safetensors").stat().st_mtime_ns == before.st_mtime_ns

    weights = (path / "model.safetensors").read_bytes()
    build_random_model(path, **SHAPE, seed=1)
    assert (path / "model.safetensors").read_bytes() != weights
    build_random_model(path, **SHAPE, seed=0)
    assert (path / "model.safetensors").read_bytes() == weights
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


def test_building_leaves_the_callers_random_numbers_alone(tmp_path):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    build_random_model(tmp_path / "model", **SHAPE)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("fields", [{"num_heads": 3}, {"dtype": "int8"}, {"architecture": "gpt"}, {"vocab_size": 9}])
def test_impossible_specs_are_refused(fields, tmp_path):
    with pytest.raises(ValueError, match=r"must be|can't share"):
        build_random_model(tmp_path / "model", **fields)


def test_variants_and_yarn(tmp_path, monkeypatch):
    from transformers import AutoConfig

    monkeypatch.setenv("TESSERA_HOME", str(tmp_path))
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
    path = build_preset("tiny-llama", **SHAPE, dtype="bfloat16", vocab_size=320, rope_scaling=yarn)
    assert path.parent == default_model_dir() == tmp_path / "models"
    assert path.name.startswith("tiny-llama-")  # never in the preset's own folder
    config = AutoConfig.from_pretrained(path)
    assert config.rope_parameters["rope_type"] == "yarn"
    assert config.dtype == torch.bfloat16
    assert config.vocab_size == 320


@given(st.text())
@settings(derandomize=True, deadline=None)
def test_tokenizer_gives_one_token_per_byte_and_loses_nothing(tokenizer, text):
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
    assert tokenizer(text)["input_ids"] == ids  # no tokens are added around it


def test_special_tokens_are_recognised_unless_they_are_to_be_split(tokenizer):
    for index, token in enumerate(SPECIAL_TOKENS):
        assert tokenizer(token)["input_ids"] == [index]
        assert len(tokenizer(token, split_special_tokens=True)["input_ids"]) == len(token)
    assert set(tokenizer.all_special_tokens) == set(SPECIAL_TOKENS)
    assert tokenizer.decode([2, *tokenizer("hi")["input_ids"], 3], skip_special_tokens=True) == "hi"
    assert tokenizer.eos_token == "</s>"


def test_chat_template(tokenizer):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
    ]
    system, user, assistant = (
        "<|im_start|>system\nBe brief.<|im_end|>\n",
        "<|im_start|>user\nHi<|im_end|>\n",
        "<|im_start|>assistant\nHello<|im_end|>\n",
    )
    render = tokenizer.apply_chat_template
    assert render(messages, tokenize=False) == system + user + assistant
    assert render(messages[:2], tokenize=False, add_generation_prompt=True) == system + user + "<|im_start|>assistant\n"


def test_chat_template_with_tools(tokenizer):
    tool = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}
    call = {"id": "1", "type": "function", "function": {"name": "look_up", "arguments": {"word": "tessera"}}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "a tile"},
    ]
    text = tokenizer.apply_chat_template(messages, tools=[tool], tokenize=False)
    assert text == (
        f"<|im_start|>system\nBe brief.\n\nTools:\n{json.dumps(tool)}<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n"
        f"<|im_start|>assistant\n\n<tool_call>\n{json.dumps(call['function'])}\n</tool_call><|im_end|>\n"
        "<|im_start|>tool\na tile<|im_end|>\n"
    )
    alone = tokenizer.apply_chat_template(messages[1:2], tools=[tool], tokenize=False)
    assert alone.startswith(f"<|im_start|>system\nTools:\n{json.dumps(tool)}<|im_end|>\n<|im_start|>user")


def test_command_line(tmp_path, capsys):
    folder = tmp_path / "model"
    assert main(["tiny-llama", str(folder), "--seed", "7"]) == 0
    assert capsys.readouterr().out == f"{folder}\n"
    (tmp_path / "file").write_text("")
    assert main(["tiny-llama", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith("error: ")
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    assert "bench-100m" in capsys.readouterr().out


def test_the_module_itself_imports_nothing_heavy():
    code = "import sys, app.models.random_model; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
