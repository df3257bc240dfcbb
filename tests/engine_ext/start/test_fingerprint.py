# SPDX-License-Identifier: Apache-2.0
"""Fingerprints of models."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine_ext.start.fingerprint import weights_digest
from engine_ext.start.weights import UnknownWeightsError


def digest(path, load_format="auto"):
    model = SimpleNamespace(model=str(path), revision=None)
    return weights_digest(model, SimpleNamespace(load_format=load_format, download_dir=None))


def change_one_number(model):
    (weights,) = model.glob("*.safetensors")
    tensors = load_file(weights)
    name = max(tensors, key=lambda name: tensors[name].numel())
    tensors[name].view(torch.uint8).view(-1)[-1] ^= 1
    save_file(tensors, weights, {"format": "pt"})


def change_the_configuration(model):
    fields = json.loads((model / "config.json").read_text())
    fields["rms_norm_eps"] /= 2
    (model / "config.json").write_text(json.dumps(fields))


def quantize(model):
    (model / "quantize_config.json").write_text("{}")


def put_things_beside_it(model):
    (model / "README.md").write_text("Copied.")
    for name in ("profile.json", "of-our-questions.profile.json", "results/summary.json"):
        (model / name).parent.mkdir(exist_ok=True)
        (model / name).write_text("{}")


@pytest.mark.parametrize(
    ("change", "is_another"),
    [(change_one_number, True), (change_the_configuration, True), (quantize, True), (put_things_beside_it, False)],
)
def test_what_makes_another_model(change, is_another, tiny_llama, tmp_path):
    copy = shutil.copytree(tiny_llama, tmp_path / "elsewhere")
    change(copy)
    assert (digest(copy) != digest(tiny_llama)) is is_another


def test_weights_that_are_not_read_from_files_are_unknown(tiny_llama):
    with pytest.raises(UnknownWeightsError, match="dummy"):
        digest(tiny_llama, "dummy")
    with pytest.raises(UnknownWeightsError, match="no files of nobody/nothing"):
        digest("nobody/nothing")
