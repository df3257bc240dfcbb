# SPDX-License-Identifier: Apache-2.0
"""`tessera adapt`: a whole run, an interrupted one, and what it refuses."""

import json
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from engine_ext.start.chunk_adapter import ChunkAdapter
from engine_ext.start.weights import files_digest
from machine import processor
from training.adapt import command
from training.adapt.command import main
from training.adapt.trainer import Trainer


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    folder = tmp_path / "documents"
    folder.mkdir()
    for number in range(20):
        text = f"Station {number} is in Riga. Its {number} rooms are let to guests of the house."
        (folder / f"{number}.txt").write_text(text)
    return folder


@pytest.fixture
def adapt(folder: Path, documents: Path, tmp_path: Path) -> Any:
    def run(*options: str, model: str | Path = folder) -> int:
        given = ["--documents", str(documents), "--output", str(tmp_path / "out"), "--work", str(tmp_path / "work")]
        return main([str(model), *given, "--steps", "3", "--chunks", "2", "--tasks", "1", *options])

    return run


def test_a_run_that_goes_on_with_more_steps(adapt, folder, tmp_path, capsys):
    assert adapt("--positions", "all", "--rank", "2") == 0
    facts = json.loads((tmp_path / "out" / "adapted.json").read_text())
    assert (facts["step"], facts["rank"]) == (3, 2)
    adapter = ChunkAdapter.read(tmp_path / "out", tmp_path / "copy")
    assert adapter.positions == ("offset", "shared", "parallel")
    assert (adapter.rank, adapter.weights) == (2, files_digest(folder))
    lines = [json.loads(line) for line in (tmp_path / "work" / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3]
    checks = [line for line in lines if "held_out" in line]
    assert [line["step"] for line in checks] == [0, 3]
    assert all(set(line["held_out"]) == {"offset", "shared", "parallel"} for line in checks)
    assert "tessera calibrate" in capsys.readouterr().err
    assert adapt("--positions", "all", "--rank", "2", "--steps", "5") == 0
    assert "resuming from step 3" in capsys.readouterr().err
    assert json.loads((tmp_path / "out" / "adapted.json").read_text())["step"] == 5
    lines = [json.loads(line) for line in (tmp_path / "work" / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4, 5]


def test_an_interrupted_run_is_resumed(adapt, tmp_path, monkeypatch, capsys):
    step = Trainer.train_step

    def interrupted(trainer: Trainer) -> float:
        signal.raise_signal(signal.SIGINT)
        return step(trainer)

    monkeypatch.setattr(Trainer, "train_step", interrupted)
    assert adapt() == 130
    monkeypatch.setattr(Trainer, "train_step", step)
    assert adapt() == 0
    told = capsys.readouterr().err
    assert "interrupted at step 1; the same command resumes" in told
    assert "resuming from step 1" in told
    assert json.loads((tmp_path / "out" / "adapted.json").read_text())["step"] == 3


def test_another_run_in_the_same_place(adapt, capsys):
    assert adapt() == 0
    capsys.readouterr()
    assert adapt("--seed", "1") == 2
    told = capsys.readouterr().err
    assert "is of another run (seed 0)" in told
    assert "loading the model" not in told


def test_a_folder_in_use_is_left_alone(adapt, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "letter.txt").write_text("mine")
    assert adapt() == 2
    assert "is in use: it has no adapted.json" in capsys.readouterr().err
    assert (tmp_path / "out" / "letter.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--steps", "0"], "must be at least 1"),
        (["--positions", "magic"], "invalid choice"),
        (["--documents", "/absent"], "/absent is not a folder"),
    ],
)
def test_wrong_options(adapt, capsys, options, words):
    assert adapt(*options) == 2
    assert words in capsys.readouterr().err


def test_no_model_or_too_little_memory(adapt, monkeypatch, capsys):
    assert adapt(model="absent/model") == 2
    assert "no files of absent/model" in capsys.readouterr().err
    memory = psutil.virtual_memory()._replace(available=1 << 30)
    monkeypatch.setattr(command.psutil, "virtual_memory", lambda: memory)
    assert adapt() == 2
    assert "GiB of memory, and 1 GiB are free: stop other programs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("own", "flags", "device", "expected"),
    [
        ("bfloat16", {"avx512_bf16"}, "cpu", "bfloat16"),
        ("bfloat16", {"amx_bf16"}, "cpu", "bfloat16"),
        ("bfloat16", {"avx2"}, "cpu", "float32"),
        ("bfloat16", {"avx2"}, "cuda", "bfloat16"),
        ("float16", {"avx512_bf16"}, "cuda", "float32"),
        ("float32", {"avx512_bf16"}, "cpu", "float32"),
    ],
)
def test_a_model_is_trained_in_its_dtype_where_that_is_quick(own, flags, device, expected, tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "dtype": own}))
    monkeypatch.setattr(processor, "cpu_flags", lambda: frozenset(flags))
    assert command._dtype(tmp_path, device) == getattr(torch, expected)
