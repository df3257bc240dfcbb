# SPDX-License-Identifier: Apache-2.0
"""Fingerprints of models."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from app.models.random_model import build_preset
from engine_ext.start.fingerprint import UnknownWeightsError, weights_digest


def digest(path, load_format="auto"):
    model, load = (
        SimpleNamespace(model=str(path), revision=None),
        SimpleNamespace(load_format=load_format, download_dir=None),
    )
    return weights_digest(model, load)


@pytest.fixture
def model(tmp_path):
    return build_preset("tiny-llama", tmp_path / "model")


def test_the_same_files_elsewhere_are_the_same_model(model, tmp_path):
    copy = shutil.copytree(model, tmp_path / "elsewhere")
    (copy / "README.md").write_text("Copied.")
    assert digest(model) == digest(copy)


def test_one_other_number_makes_another_model(model):
    before = digest(model)
    (weights,) = model.glob("*.safetensors")
    tensors = load_file(weights)
    name = max(tensors, key=lambda name: tensors[name].numel())
    tensors[name].view(torch.uint8).view(-1)[-1] ^= 1
    save_file(tensors, weights, {"format": "pt"})
    assert digest(model) != before


def test_another_configuration_makes_another_model(model):
    before = digest(model)
    config = model / "config.json"
    fields = json.loads(config.read_text())
    config.write_text(json.dumps({**fields, "rms_norm_eps": fields["rms_norm_eps"] / 2}))
    assert digest(model) != before


def test_what_lies_beside_a_model_is_no_part_of_it(model):
    before = digest(model)
    (model / "profile.json").write_text("{}")
    (model / "of-our-questions.profile.json").write_text("{}")
    (model / "results").mkdir()
    (model / "results" / "summary.json").write_text("{}")
    assert digest(model) == before
    (model / "quantize_config.json").write_text("{}")
    assert digest(model) != before


def test_weights_that_are_not_read_from_files_are_unknown(model):
    with pytest.raises(UnknownWeightsError, match="dummy"):
        digest(model, "dummy")
    with pytest.raises(UnknownWeightsError, match="no files of nobody/nothing"):
        digest("nobody/nothing")
