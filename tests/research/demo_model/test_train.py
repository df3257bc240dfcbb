# SPDX-License-Identifier: Apache-2.0
"""Training improves the loss, stops and resumes, and refuses incompatible checkpoints."""

import json
import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from research.demo_model.curriculum import CURRICULUM, Answering, Copying, Stage, within
from research.demo_model.model import MAX_LENGTH
from research.demo_model.train import finish, main, train
from research.demo_model.trainer import Trainer

SMALL = (
    Stage("copy", Copying(alphabet=16, chunks=1, branches=2), gate=2.0, most_steps=4, tokens=512),
    Stage("facts", Answering((1,)), gate=2.0, most_steps=4, tokens=512, decay=True),
)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two stages of four small steps, with a gate check every second step."""
    monkeypatch.setattr("research.demo_model.curriculum.CURRICULUM", SMALL)
    monkeypatch.setattr("research.demo_model.trainer.GATE_EVERY", 2)


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "log.jsonl").read_text().splitlines()]


def run(folder: Path, *arguments: str) -> int:
    return main(["--work-dir", str(folder), "--out", str(folder / "model"), *arguments])


def test_going_on_gives_the_same_losses_as_not_stopping(small, tmp_path):
    assert run(tmp_path / "whole") == 0
    for steps in ("3", "5", "100"):
        assert run(tmp_path / "parts", "--steps", steps) == 0
    assert len(losses(tmp_path / "whole")) == 8
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")


def test_an_interrupt_leaves_a_checkpoint_to_go_on_from(small, tmp_path, monkeypatch):
    import os
    import signal

    step = Trainer.train_step

    def interrupted_step(trainer: Trainer) -> float:
        if trainer.step == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return step(trainer)

    monkeypatch.setattr(Trainer, "train_step", interrupted_step)
    assert run(tmp_path) == 130
    assert len(losses(tmp_path)) == 3
    assert run(tmp_path) == 0
    assert len(losses(tmp_path)) == 8


def test_the_finished_model_loads_and_its_card_says_how_it_was_made(small, tmp_path):
    trainer = Trainer(5, "cpu")
    train(trainer, None, tmp_path / "checkpoint.pt", 100)
    finish(trainer, tmp_path / "model")
    facts = json.loads((tmp_path / "model" / "training.json").read_text())
    assert (facts["seed"], facts["step"]) == (5, 8)
    card = (tmp_path / "model" / "README.md").read_text()
    assert facts["commit"] in card
    assert "1 to 1 chunks" in card
    assert "seed 5" in card
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert loaded.dtype == torch.float32
    assert torch.equal(loaded.lm_head.weight, trainer.model.lm_head.weight)
    assert AutoTokenizer.from_pretrained(tmp_path / "model").chat_template


def test_another_seed_is_refused(small, tmp_path):
    assert run(tmp_path, "--steps", "1") == 0
    assert run(tmp_path, "--steps", "2", "--seed", "1") == 2


def test_a_folder_of_something_else_is_not_overwritten(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "notes.txt").write_text("mine")
    assert run(tmp_path, "--steps", "1") == 2
    assert (tmp_path / "model" / "notes.txt").read_text() == "mine"
    assert not (tmp_path / "checkpoint.pt").exists()


def test_a_few_steps_improve_the_loss(tmp_path):
    """A minute with AVX-512, ten without."""
    assert run(tmp_path, "--steps", "10") == 0
    assert losses(tmp_path)[-1] < losses(tmp_path)[0]
    assert not (tmp_path / "model").exists()


def test_prompts_fit_in_the_positions(encoder):
    assert within(MAX_LENGTH) == list(CURRICULUM)
    for stage in within(512):
        for sample in stage.task.samples(random.Random(0), "train", encoder, 8192):
            longest = max(len(branch.prompt) + len(branch.answer) for branch in sample.branches)
            assert len(sample.system) + sum(map(len, sample.chunks)) + longest <= 512


def test_an_end_of_half_its_length(small, tmp_path, capsys):
    assert run(tmp_path, "--end", "0.5", "--steps", "1") == 0
    assert run(tmp_path) == 2
    assert "--end 0.5 --positions 8192: remove it to start over" in capsys.readouterr().err
    assert run(tmp_path, "--end", "0.5") == 0
    assert len(losses(tmp_path)) == 4 + 2


def test_one_kind_of_attention_alone(small, tmp_path, capsys):
    assert run(tmp_path, "--attention", "full", "--steps", "2") == 0
    assert run(tmp_path) == 2
    options = "--attention full --end 1.0 --positions 8192"
    assert f"was trained with {options}: remove it to start over" in capsys.readouterr().err
    assert run(tmp_path, "--attention", "full") == 0
    configuration = json.loads((tmp_path / "model" / "config.json").read_text())
    assert configuration["chunk_attention"] == ["full"]
    assert "in equal shares: full |" in (tmp_path / "model" / "README.md").read_text()
    with pytest.raises(SystemExit):
        run(tmp_path, "--attention", "full,none")
    assert "unknown strategy 'none'" in capsys.readouterr().err
