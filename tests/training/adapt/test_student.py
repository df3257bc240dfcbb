# SPDX-License-Identifier: Apache-2.0
"""The adapter in training: active in chunks alone, and saved as it was trained."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import nn

from app.prompt.tokenization import SegmentTokenizer
from cache.positions.layout import unpack
from tests.oracle import Oracle
from training.adapt.model import load, log_probabilities
from training.adapt.rows import make_row
from training.adapt.student import Student

TOLERANCE = 1e-4


@pytest.fixture
def student(model: Any, segments: SegmentTokenizer) -> Student:
    """An adapter with weights large enough to matter."""
    made = Student(model, segments, seed=0, rank=4)
    for parameter in made.parameters().values():
        nn.init.normal_(parameter, std=0.1)
    return made


@pytest.mark.parametrize("way", ["offset", "shared", "parallel"])
def test_saved_and_read_as_the_reference_reads_it(way, student, material, folder, tmp_path):
    """Chunks by the saved adapter, merged by PEFT, and the rest by the model."""
    student.save(tmp_path / "adapter")
    merged: Any = PeftModel.from_pretrained(load(folder), tmp_path / "adapter").merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    oracle = Oracle(folder, writer=Oracle(tmp_path / "merged"))
    sample = replace(material.sample("train", 0, 0), block_tokens=None)
    prompt, (branch, *_) = sample.prompt, sample.branches
    with torch.no_grad():
        found = student.log_probabilities(sample, way)[: len(branch.tokens)]
        plain = log_probabilities(load(folder), make_row(prompt, [branch], way))
    chunks = [unpack(chunk.packed) for chunk in prompt.chunks]
    expected = oracle.score(way, (prompt.system, chunks, branch.question), branch.answer).distributions
    torch.testing.assert_close(found[len(branch.question) - 1 :], expected, rtol=0, atol=TOLERANCE)
    assert float((found - plain).abs().max()) > 100 * TOLERANCE


def test_the_teacher_is_the_untouched_model(student, material, folder):
    sample = material.sample("train", 0, 0)
    with torch.no_grad():
        expected = log_probabilities(load(folder), make_row(sample.prompt, sample.branches, "full"))
    assert torch.equal(student.taught(sample), expected)


def test_matrices_of_a_bfloat16_model_are_trained_in_float32(folder, segments, material):
    student = Student(load(folder, dtype=torch.bfloat16), segments, seed=0, rank=4)
    student.log_probabilities(material.sample("train", 0, 0), "offset").mean().backward()
    parameters = student.parameters()
    assert {each.dtype for each in parameters.values()} == {torch.float32}
    gradients = {name: float(each.grad.abs().max()) for name, each in parameters.items()}
    # The second matrices are zero at the start, so that the first have no gradient yet.
    assert all((gradient > 0) == ("lora_B" in name) for name, gradient in gradients.items())


def test_of_the_last_layer_only_keys_and_values_are_trained(student, tmp_path):
    student.save(tmp_path / "adapter")
    files = {path.name for path in (tmp_path / "adapter").iterdir()}
    assert files == {"adapter_config.json", "adapter_model.safetensors"}
    by_layer = dict[int, set[str]]()
    for name in load_file(tmp_path / "adapter" / "adapter_model.safetensors"):
        parts = name.split(".")
        by_layer.setdefault(int(parts[4]), set()).add(parts[-3])
    assert by_layer.pop(max(by_layer)) == {"k_proj", "v_proj"}
    assert all(len(each) == 7 for each in by_layer.values())


def test_segments_are_padded_where_they_can_be_shared_in_place(student, segments, material):
    sample = replace(material.sample("train", 0, 0), block_tokens=16)
    plain, padded = student._row(sample, "offset"), student._row(sample, "parallel")
    contexts = [row.ids[0, : row.num_context] for row in (plain, padded)]
    assert len(contexts[0]) < len(contexts[1])
    assert len(contexts[1]) % 16 == 0
    assert contexts[1][-1] == segments.filler
    assert torch.equal(*(ids[ids != segments.filler] for ids in contexts))
    assert torch.equal(padded.ids[0, padded.num_context :], plain.ids[0, plain.num_context :])
