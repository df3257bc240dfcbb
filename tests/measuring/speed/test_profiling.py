# SPDX-License-Identifier: Apache-2.0
"""Profiles: which stage a sample counts for, and py-spy at a process without a model."""

import json

import pytest

from measuring.kit.texts import Texts
from measuring.speed import profiling
from measuring.speed.profiling import STAGES, count, profile
from measuring.speed.rag import BenchmarkError
from measuring.speed.servers import Servers

VLLM = "run_server (vllm/entrypoints/launchers/api_server/entry.py:9)"
ROUTE = "chat (app/routes/rag.py:40)"


@pytest.mark.parametrize(
    ("stack", "stage"),
    [
        ((VLLM, ROUTE, "look_up (cache/manager.py:87)"), "planning"),
        ((VLLM, ROUTE, "loads (json/__init__.py:1)"), "request and report"),
        ((VLLM, ROUTE, "generate (vllm/v1/engine/async_llm.py:2)"), "engine core"),
        (("main (app/cli.py:45)", "run (uvloop/__init__.py:92)"), "event loop"),
        (("worker (vllm/v1/worker/w.py:1)", "load (engine_ext/core/worker.py:120)"), "load: which rows and slots"),
        (
            (
                "load (engine_ext/core/worker.py:120)",
                "load (kernels/paged.py:90)",
                "AngleTables.of (kernels/rope.py:130)",
            ),
            "load: gather, rotate, scatter",
        ),
        (("forward (vllm/model_executor/models/llama.py:3)", "_call_impl (torch/nn/modules/module.py:7)"), "forward"),
        (("run (threading.py:1)",), "other"),
    ],
)
def test_a_sample_counts_for_its_innermost_known_frame(stack, stage):
    assert count([f"process 1;{';'.join(stack)} 3", f"{';'.join(stack)} 2"]) == {stage: 5}


def test_stages_are_told_apart():
    assert len({stage.name for stage in STAGES}) == len(STAGES)


@pytest.fixture
def small(monkeypatch, small_processes):
    monkeypatch.setattr(profiling, "REQUESTS", 5)


async def test_a_server_is_sampled(small, tmp_path):
    async with Servers("model", (), tmp_path) as servers:
        result = await profile(await servers.get("tessera"), Texts("a"), tmp_path)
    assert result.requests == 5
    assert result.ttft_ms > 0
    assert result.reported
    assert (tmp_path / "profile.txt").exists()
    assert json.loads((tmp_path / "profile.json").read_text())["own_python_ms"] == result.own_python_ms


async def test_what_py_spy_says_is_passed_on(small, tmp_path, monkeypatch):
    async with Servers("model", (), tmp_path) as servers:
        server = await servers.get("tessera")
        monkeypatch.setattr(server.process.process, "pid", 2**22 + 1)
        with pytest.raises(BenchmarkError, match=r"py-spy could not look at the server: .+"):
            await profile(server, Texts("a"), tmp_path)
        monkeypatch.undo()


async def test_without_py_spy_the_error_says_how_to_get_it(small, tmp_path, monkeypatch):
    async with Servers("model", (), tmp_path) as servers:
        server = await servers.get("tessera")
        monkeypatch.setattr("shutil.which", lambda *_, **__: None)
        with pytest.raises(BenchmarkError, match="pip install py-spy"):
            await profile(server, Texts("a"), tmp_path)
