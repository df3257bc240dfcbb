# SPDX-License-Identifier: Apache-2.0
"""Training lowers the held-out loss, stops in time, and resumes with the same steps."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from training.adapt import trainer as module
from training.adapt.material import Material
from training.adapt.model import load
from training.adapt.student import Student
from training.adapt.trainer import Plan, Trainer, read_checkpoint, ways_of

OF: Any = {"model": "m", "weights": "w", "documents": "d", "positions": ("offset",), "seed": 0, "questions": None}
PLAN = Plan(**OF, steps=12, passage_tokens=128, chunks=(2, 3), tasks=2, rank=4)


def make_trainer(folder: Path, material: Material, plan: Plan = PLAN) -> Trainer:
    return Trainer(Student(load(folder), material._template.segments, plan.seed, plan.rank), material, plan)


def parameters(trainer: Trainer) -> torch.Tensor:
    return torch.cat([each.detach().flatten() for each in trainer.student.parameters().values()])


def test_the_held_out_loss_falls(folder, material):
    trainer = make_trainer(folder, material)
    before = trainer.check()
    for _ in range(PLAN.steps):
        trainer.train_step()
    assert trainer.check()["offset"] < before["offset"]
    assert trainer.is_finished
    assert trainer.progress.best_step == PLAN.steps


def test_a_resumed_run_has_the_same_steps(folder, material, tmp_path):
    whole = make_trainer(folder, material)
    losses = [whole.train_step() for _ in range(6)]
    first = make_trainer(folder, material)
    assert [first.train_step() for _ in range(3)] == losses[:3]
    first.save(tmp_path / "checkpoint.pt")
    second = make_trainer(folder, material)
    second.restore(read_checkpoint(tmp_path / "checkpoint.pt", PLAN))
    assert [second.train_step() for _ in range(3)] == losses[3:]
    assert torch.equal(parameters(second), parameters(whole))


def test_a_damaged_checkpoint_and_one_of_another_run_are_refused(folder, material, tmp_path):
    path = tmp_path / "checkpoint.pt"
    make_trainer(folder, material).save(path)
    changes: dict[str, Any] = {"seed": 1, "positions": ("shared",), "documents": "e", "weights": "x"}
    for name, value in changes.items():
        with pytest.raises(ValueError, match=f"of another run .{name}"):
            read_checkpoint(path, replace(PLAN, **{name: value}))
    whole = path.read_bytes()
    for found in (b"", b"nothing", whole[: len(whole) // 2]):
        path.write_bytes(found)
        with pytest.raises(ValueError, match="remove it to start over"):
            read_checkpoint(path, PLAN)


def test_it_ends_when_the_held_out_loss_falls_no_longer(folder, material, monkeypatch):
    monkeypatch.setattr(module, "CHECK_EVERY", 1)
    monkeypatch.setattr(module, "RATE", 0.0)
    trainer = make_trainer(folder, material)
    trainer.check()
    best = parameters(trainer)
    for _ in range(module._PATIENCE):
        assert not trainer.is_finished
        trainer.train_step()
        trainer.check()
    assert trainer.is_finished
    trainer.use_best()
    assert torch.equal(parameters(trainer), best)


def test_positions():
    assert ways_of(["all"]) == ("offset", "shared", "parallel")
    assert ways_of(["parallel", "offset"]) == ("offset", "parallel")
