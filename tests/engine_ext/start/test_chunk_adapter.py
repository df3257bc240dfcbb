# SPDX-License-Identifier: Apache-2.0
"""Adapters for writing: what vLLM is asked for, and folders that are refused in one line."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs

from engine_ext.start.chunk_adapter import NOTE, ChunkAdapter
from engine_ext.start.support import UnsupportedFlagError
from tests.support import adapters
from tests.support.adapters import MODULES, RANK

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@pytest.fixture
def folder(tiny_llama: Path, tmp_path: Path) -> Path:
    return adapters.ChunkAdapter.make("writer", tiny_llama, tmp_path).folder


def changed(folder: Path, name: str, **fields: Any) -> None:
    path = folder / name
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def enabled(folder: Path, model: Path, **arguments: Any) -> AsyncEngineArgs:
    args = AsyncEngineArgs(str(model), dtype="float32", **arguments)
    ChunkAdapter.read(folder, folder.parent / "copy").enable(args)
    return args


def test_vllm_runs_it_alone(folder: Path, tiny_llama: Path) -> None:
    args = enabled(folder, tiny_llama)
    assert (args.enable_lora, args.max_loras, args.max_lora_rank) == (True, 1, 8)
    assert args.lora_target_modules == sorted(MODULES)


def test_or_beside_clients_adapters(folder: Path, tiny_llama: Path) -> None:
    given = {"enable_lora": True, "max_loras": 3, "max_cpu_loras": 5, "max_lora_rank": 64}
    args = enabled(folder, tiny_llama, **given, lora_target_modules=["down_proj"])
    assert (args.max_loras, args.max_cpu_loras, args.max_lora_rank) == (4, 6, 64)
    assert args.lora_target_modules == sorted({"down_proj", *MODULES})


def test_the_digest_is_of_what_the_engine_runs(folder: Path, tiny_llama: Path, tmp_path: Path) -> None:
    first = ChunkAdapter.read(folder, tmp_path / "1")
    assert (first.rank, first.positions) == (RANK, ("parallel",))
    changed(folder, NOTE, positions=["offset"])
    assert ChunkAdapter.read(folder, tmp_path / "2").digest == first.digest
    changed(folder, CONFIG, lora_alpha=99)
    assert ChunkAdapter.read(folder, tmp_path / "3").digest != first.digest
    assert json.loads((first.copy / CONFIG).read_text())["lora_alpha"] != 99


def truncated(folder: Path) -> None:
    whole = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(whole[: len(whole) // 2])


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: (folder / NOTE).unlink(), "adapted.json: No such file"),
        (lambda folder: (folder / CONFIG).unlink(), "adapter_config.json: No such file"),
        (lambda folder: (folder / WEIGHTS).unlink(), "adapter_model.safetensors: No such file"),
        (truncated, "no adapter of tessera adapt, or damaged"),
        (lambda folder: (folder / NOTE).write_text("[]"), "no adapter of tessera adapt, or damaged"),
        (lambda folder: (folder / CONFIG).write_text("{}"), "no adapter of tessera adapt, or damaged"),
        (lambda folder: changed(folder, CONFIG, r=1000), "its rank is 1000, and vLLM's largest is 512"),
        (lambda folder: changed(folder, NOTE, weights="others"), "it was trained for another model"),
    ],
)
def test_refused(damage: Callable[[Path], object], words: str, folder: Path, tiny_llama: Path) -> None:
    damage(folder)
    with pytest.raises(UnsupportedFlagError, match=f"^--chunk-adapter {re.escape(str(folder))}: .*{words}") as refusal:
        enabled(folder, tiny_llama)
    assert "\n" not in str(refusal.value)


async def test_what_vllm_can_not_load(folder: Path, tmp_path: Path) -> None:
    async def add_lora(request: Any) -> bool:
        raise RuntimeError("vLLM does not yet\nsupport DoRA.")

    adapter, llm = ChunkAdapter.read(folder, tmp_path / "copy"), SimpleNamespace(add_lora=add_lora)
    with pytest.raises(UnsupportedFlagError, match=r"vLLM can't load it: vLLM does not yet support DoRA\.$"):
        await adapter.load(llm)
