# SPDX-License-Identifier: Apache-2.0
"""Saved models: what is unchanged without chunks, and what was learned with them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from app.prompt.tokenization import SegmentTokenizer
from cache.positions.layout import ChunkTokens, pack
from cache.positions.strategy import TRAINED_FOR
from tests.training.adapt.plan import PLAN
from training.adapt.material import Material
from training.adapt.model import load, log_probabilities
from training.adapt.rows import make_row
from training.adapt.students import Lora, SoftTokens
from training.adapt.trainer import Trainer

PLAIN = torch.tensor([list(range(20, 90))])


def trained(student: Any, material: Material) -> Trainer:
    trainer = Trainer(student, material, replace(PLAN, steps=3, rate=student.rate))
    for _ in range(3):
        trainer.train_step()
    return trainer


def logits(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder)(PLAIN).logits


def test_soft_tokens_leave_everything_else_as_it_was(
    model: Any, tokenizer: Any, segments: SegmentTokenizer, folder: Path, material: Material, tmp_path: Path
) -> None:
    student = SoftTokens(model, segments, seed=0, size=3)
    trainer = trained(student, material)
    student.save(tmp_path, AutoTokenizer.from_pretrained(folder), ["offset"], trainer.held_out())
    before, after = logits(folder), logits(tmp_path)
    number = 3 + 1
    assert torch.equal(after[..., :-number], before)
    assert torch.equal(after.log_softmax(-1)[..., :-number], before.log_softmax(-1))
    assert float(after[..., -number:].max()) < float(before.min()) - 200

    found = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert getattr(found.config, TRAINED_FOR) == ["offset"]
    around = ChunkTokens.of(found.config)
    assert around.number == number
    renamed = AutoTokenizer.from_pretrained(tmp_path)
    assert renamed.encode("<|chunk-0|>", add_special_tokens=False) == [len(tokenizer)]
    assert around.before == pack(tuple(range(len(tokenizer), len(tokenizer) + 3)))
    assert around.behind == pack((len(tokenizer) + 3,))


def test_saved_soft_tokens_are_those_that_were_trained(
    model: Any, tokenizer: Any, segments: SegmentTokenizer, material: Material, tmp_path: Path
) -> None:
    student = SoftTokens(model, segments, seed=0)
    trainer = trained(student, material)
    student.save(tmp_path, tokenizer, ["offset"], trainer.held_out())
    found, (sample, *_) = load(tmp_path), trainer.held_out()
    around = ChunkTokens.of(found.config).around
    chunks = tuple(replace(chunk, packed=around(chunk.packed)) for chunk in sample.prompt.chunks)
    with torch.no_grad():
        served = log_probabilities(found, make_row(replace(sample.prompt, chunks=chunks), sample.branches, "offset"))
        expected = student.log_probabilities(sample, "offset")
    torch.testing.assert_close(served[:, : expected.shape[1]], expected, rtol=0, atol=1e-5)


def test_lora_is_merged(
    model: Any, tokenizer: Any, segments: SegmentTokenizer, folder: Path, material: Material, tmp_path: Path
) -> None:
    pytest.importorskip("peft")
    student = Lora(model, segments, seed=0, size=4)
    trainer = trained(student, material)
    (sample, taught), *_ = trainer._held_out
    assert torch.equal(student.taught(sample), taught)  # the teacher is the untouched model
    with torch.no_grad():
        expected = student.log_probabilities(sample, "offset")
    student.save(tmp_path, tokenizer, ["offset", "shared"], trainer.held_out())
    found = load(tmp_path)
    with torch.no_grad():
        served = log_probabilities(found, make_row(sample.prompt, sample.branches, "offset"))
    torch.testing.assert_close(served, expected, rtol=0, atol=1e-4)
    assert getattr(found.config, TRAINED_FOR) == ["offset", "shared"]
    assert not torch.equal(logits(tmp_path), logits(folder))


def test_segments_are_padded_where_they_can_be_shared_in_place(
    model: Any, segments: SegmentTokenizer, material: Material
) -> None:
    student = SoftTokens(model, segments, seed=0)
    sample = replace(material.sample("train", 0, 0), block_tokens=16)
    plain, padded = student._row(sample, "offset"), student._row(sample, "parallel")
    contexts = [row.ids[0, : row.num_context] for row in (plain, padded)]
    assert len(contexts[0]) < len(contexts[1])
    assert len(contexts[1]) % 16 == 0
    assert contexts[1][-1] == segments.filler
    assert torch.equal(*(ids[ids != segments.filler] for ids in contexts))
    assert torch.equal(padded.ids[0, padded.num_context :], plain.ids[0, plain.num_context :])
