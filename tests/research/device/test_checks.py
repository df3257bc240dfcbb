# SPDX-License-Identifier: Apache-2.0
"""The checks for accelerators, on the CPU: right and wrong copies, and reports."""

import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kernels import dispatch
from kernels.torch_copier import TorchCopier
from measuring.kit.client import ServerError
from measuring.speed import servers
from research.device import cases, checklist, command, copies, exactness, speed
from research.device.checklist import Check
from research.device.command import Defaults, main
from research.device.context import Context
from research.device.devices import find_device
from research.device.engine import Engine, EngineOptions
from research.device.findings import CheckError, Finding, SkippedError
from research.device.memory import LAYOUTS
from tests.kernels.fake_npu import DEVICE_OPERATORS, FakeTorchNpu
from tests.measuring.fake_server import answer_of

CPU = replace(find_device("cpu"), layouts=("BHN2D", "MLA", "BLNHC"), head_sizes=(64,))
DEFAULTS = Defaults("cpu", (torch.bfloat16,), "tiny-llama", "Try the checks.")


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch) -> None:
    """The reference takes its time."""
    monkeypatch.setattr(cases, "SPANS", ((3, 0), (5, 131_072), (1, -1), (9, 0), (2, 7)))
    monkeypatch.setattr(speed, "SIZES", speed.Sizes(64, 2, 2, 64, iterations=3))


def context(device=CPU, **fields) -> Context:
    return Context(device, (torch.bfloat16,), Engine(EngineOptions("tiny-llama", "bfloat16", None, 0.05)), **fields)


# Copies


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
async def test_the_torch_copier_is_right(dtype):
    device = replace(CPU, layouts=tuple(LAYOUTS))
    finding = await copies.compare(cases.cases(device, [dtype])[::3], device, TorchCopier)
    assert "12 cases by torch are right" in finding.message
    assert finding.values["worst_error_of_allowed"] <= 1


class TurnsBack(TorchCopier):
    def _load(self, slots, rows, deltas):
        super()._load(slots, rows, -deltas)


class DropsLastSaved(TorchCopier):
    def _save(self, slots, rows):
        super()._save(slots[:-1], rows[:-1])


class LoadsOneMore(TorchCopier):
    def _load(self, slots, rows, deltas):
        super()._load(slots, rows, deltas)
        free = min(set(range(self._num_slots)) - set(slots.tolist()))
        super()._load(torch.tensor([free]), rows[:1], deltas[:1])


class WritesOutside(TorchCopier):
    def _save(self, slots, rows):
        super()._save(slots, rows)
        self.layers[-1].key_blocks.tiles.as_strided((1,), (1,), 0).zero_()


class Crashes(TorchCopier):
    def _load(self, slots, rows, deltas):
        raise RuntimeError("no such\n  kernel")


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (TurnsBack, "load: layer 0: turned keys are off by up to .* times"),
        (DropsLastSaved, "save: layer 0: K in the pool: .* elements are wrong, the first at block .*instead of"),
        (LoadsOneMore, "load: layer 0: K in the blocks: .* instead of nan"),
        (WritesOutside, "save: 1 elements around K and V were written to"),
        (Crashes, "RuntimeError: no such kernel"),
    ],
)
async def test_a_broken_copier_is_noticed(broken, words):
    """Broken for one layout, among others for which it is right."""

    def make(layers):
        return broken(layers) if layers[0].value_blocks.shape[3] == 512 else TorchCopier(layers)

    with pytest.raises(CheckError, match=f"1 of 3 cases are wrong, the first: MLA, float32, .*{words}") as caught:
        await copies.compare(cases.cases(CPU, [torch.float32])[::4], CPU, make)
    assert caught.value.values["failed"] == len(caught.value.values["failures"]) == 1


@pytest.mark.parametrize("version", DEVICE_OPERATORS)
async def test_the_npus_operators_are_compared(version, monkeypatch):
    fake = FakeTorchNpu()
    monkeypatch.setitem(sys.modules, "torch_npu", fake)
    npu, write = replace(CPU, layouts=("pair", "pair MLA")), DEVICE_OPERATORS[version](fake).reshape_and_cache
    monkeypatch.setattr(dispatch, "_device", lambda _: SimpleNamespace(type="npu"))
    finding = await copies.kernels(context(npu, load_writer=lambda: write))
    assert finding.message.startswith("8 cases by torch_npu are right")


async def test_checks_without_their_means_are_skipped(monkeypatch):
    def load_writer():
        raise ImportError("no module named vllm_ascend")

    with pytest.raises(SkippedError, match="no module named vllm_ascend"):
        await copies.kernels(context(load_writer=load_writer))
    monkeypatch.setitem(sys.modules, "kernels.triton_copier", None)
    with pytest.raises(SkippedError, match="triton_copier"):
        await copies.kernels(context(by_triton=True))
    with pytest.raises(SkippedError, match=r"torch\.cuda"):
        await speed.no_sync(context())


# Speed


async def test_bandwidth_is_measured_beside_a_plain_copy(monkeypatch):
    monkeypatch.setattr(speed, "LEAST_SHARE", 0.0)
    finding = await speed.bandwidth(context())
    assert finding.values["share_of_copy"].keys() == {"load", "save"}
    assert all(rate > 0 for rate in finding.values["gb_per_s"].values())
    assert finding.values["tokens"] == 64
    monkeypatch.setattr(speed, "LEAST_SHARE", 1e9)
    with pytest.raises(CheckError, match="is expected") as caught:
        await speed.bandwidth(context())
    assert "gb_per_s" in caught.value.values


# Engine


@pytest.fixture
async def running(fakes, model, tmp_path) -> AsyncIterator[Context]:
    """An engine whose server has no model, and answers as it should."""
    fakes.state = {"answer": in_any_order}
    options = EngineOptions(str(model), "bfloat16", tmp_path / "out", 0.05, ("--seed", "1"))
    async with Engine(options) as engine:
        yield Context(CPU, (torch.bfloat16,), engine)
    assert not fakes.running


def in_any_order(prompt, max_tokens):
    return answer_of(replace(prompt, chunks=tuple(sorted(prompt.chunks))), max_tokens)


async def test_the_cache_is_on(running, fakes):
    finding = await checklist.engine(running)
    assert finding.message == "vLLM 0.32.0 started, its self-check passed, and the chunk cache is on, for 64000 tokens"
    flags = fakes.flags["tessera"]
    assert flags[:4] == ("--dtype", "bfloat16", "--max-model-len", "2560")
    assert flags[-2:] == ("--seed", "1")
    assert "--enforce-eager" not in flags


OF_THE_ENGINE = (checklist.engine, exactness.exactness)


@pytest.mark.parametrize("check", OF_THE_ENGINE)
async def test_a_cache_that_is_off_fails_every_check_of_it(check, running, fakes):
    fakes.state = {"off": "no layout explains it"}
    with pytest.raises(ServerError, match="the chunk cache is off: no layout explains it"):
        await check(running)


async def test_an_engine_that_does_not_start_is_started_once(running, monkeypatch):
    started = []

    @asynccontextmanager
    async def start(name, *_, **__):
        started.append(name)
        raise ServerError("out of luck")
        yield

    monkeypatch.setattr(servers, "running", start)
    for check in OF_THE_ENGINE:
        with pytest.raises(ServerError, match="out of luck"):
            await check(running)
    assert started == ["tessera"]


async def test_equal_answers_are_exact(running):
    finding = await exactness.exactness(running)
    assert "23 comparisons: log probabilities differ by at most 0 " in finding.message
    assert min(finding.values["replaced"]) > 1


def kept_is_wrong(prompt, max_tokens):
    """Cached chunks give another answer than chunks just computed."""
    return in_any_order(replace(prompt, question=f"{prompt.question}{'kept' in prompt.namespace}"), max_tokens)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (kept_is_wrong, "log probabilities differ by 4.9"),
        (answer_of, "shared: two orders of cached chunks: log probabilities differ"),
        (lambda _, max_tokens: "a" * max_tokens, "the comparisons prove nothing"),
    ],
)
async def test_wrong_answers_are_noticed(answer, words, running, fakes):
    fakes.state["answer"] = answer
    with pytest.raises(CheckError, match=words):
        await exactness.exactness(running)


@pytest.mark.parametrize(
    ("mode", "words"),
    [("full", r"a request ran full with chunks \['filled'.* was due"), ("chunked", "in mode full ran chunked")],
)
async def test_answers_that_ran_otherwise_are_no_proof(mode, words, running, fakes):
    fakes.state["report"] = lambda report: {**report, "mode": mode}
    with pytest.raises(CheckError, match=words):
        await exactness.exactness(running)


def token(name: str, logprob: float, **others: float) -> dict:
    top = [{"token": each, "logprob": value} for each, value in {name: logprob, **others}.items()]
    return {"token": name, "logprob": logprob, "top_logprobs": top}


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ([token("a", -0.1), token("b", -0.2)], [token("a", -0.1), token("b", -0.5)], 0.3),
        ([token("a", -0.7, b=-0.72), token("c", -1)], [token("b", -0.7, a=-0.71), token("d", -3)], 0.02),
        ([token("a", -0.1, b=-3.0)], [token("b", -0.2, a=-2.0)], 2.8),
        ([token("a", -0.1)], [token("b", -4.0, c=-5.0)], 4.9),
    ],
)
def test_answers_are_compared_as_far_as_they_go_together(one, other, expected):
    assert exactness.difference(one, other) == exactness.difference(other, one) == pytest.approx(expected)


# Command


def check(name: str, outcome: Finding | Exception, kinds=("cpu",)) -> Check:
    async def make(_: Context) -> Finding:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    return Check(name, "a check", make, kinds)


@pytest.fixture
def listed(monkeypatch) -> None:
    made = (
        check("first", Finding("measured 3", {"n": 3})),
        check("wrong", CheckError("this is\n  wrong", {"seen": 4})),
        check("crash", ZeroDivisionError("by zero")),
        check("elsewhere", Finding("not for a CPU"), ("npu",)),
        check("cannot", SkippedError("no means")),
        check("last", Finding("fine")),
    )
    monkeypatch.setattr(checklist, "CHECKS", made)


@pytest.mark.usefixtures("listed")
def test_a_failure_ends_nothing_but_its_check_and_results_are_written(tmp_path, capsys):
    file = tmp_path / "results.json"
    assert main(["--json", str(file)], DEFAULTS) == 1
    lines, written = capsys.readouterr().out.splitlines(), json.loads(file.read_text())
    assert [line.split(maxsplit=2) for line in lines[:-1]] == [
        ["first", "PASS", "measured 3"],
        ["wrong", "FAIL", "this is wrong"],
        ["crash", "FAIL", "ZeroDivisionError: by zero"],
        ["cannot", "SKIPPED", "no means"],
        ["last", "PASS", "fine"],
    ]
    assert lines[-1].startswith("2 passed, 2 failed, 1 skipped on ")
    assert (written["device"]["kind"], written["arguments"]) == ("cpu", ["--json", str(file)])
    assert [each["status"] for each in written["results"]] == ["PASS", "FAIL", "FAIL", "SKIPPED", "PASS"]
    first, wrong = written["results"][:2]
    assert (first["message"], first["values"], first["trace"]) == ("measured 3", {"n": 3}, None)
    assert (wrong["message"], wrong["values"]) == ("this is wrong", {"seen": 4})
    assert "CheckError" in wrong["trace"]


@pytest.mark.usefixtures("listed")
def test_what_is_skipped_is_no_failure(capsys):
    assert main(["--only", "last", "cannot", "first"], DEFAULTS) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["first", "cannot", "last", "2"]


@pytest.mark.usefixtures("listed")
@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--only", "frist"], "there is no check 'frist'; there are first, wrong, crash, cannot, last"),
        (["--only", "elsewhere"], "there is no check 'elsewhere'"),
        (["--json", "no/such/folder/file"], "--json: no folder no/such/folder"),
        (["--model", "no-model"], "neither a folder nor a random model: no-model; there are tiny-llama"),
        (["--kv-cache-memory-bytes", "8G"], "unrecognized arguments"),
    ],
)
def test_what_makes_no_sense_is_refused_in_words(argv, words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(argv, DEFAULTS)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(("kind", "words"), [("cuda", "no NVIDIA GPU at hand"), ("npu", "no Ascend NPU at hand")])
def test_a_missing_device_is_named_with_what_is_needed(kind, words, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    assert main([], replace(DEFAULTS, kind=kind)) == 2
    said = capsys.readouterr().err
    assert words in said
    assert "needed: a machine with an" in said


def test_from_the_command_line_to_the_kernels(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(command, "find_device", lambda _: CPU)
    assert main(["--only", "kernels", "--json", str(tmp_path / "results.json")], DEFAULTS) == 0
    assert "12 cases by torch are right" in capsys.readouterr().out
    (result,) = json.loads((tmp_path / "results.json").read_text())["results"]
    assert result["values"]["copiers"] == ["torch"]


ROOT = Path(__file__).parents[3]
BARE = """
import sys
ALLOWED = {*sys.stdlib_module_names, "torch", "torchgen", "functorch", "triton", "numpy", "sympy", "mpmath", "networkx"}
ALLOWED |= {"typing_extensions", "filelock", "jinja2", "markupsafe", "fsspec", "setuptools", "packaging"}  # torch's
ALLOWED |= {"app", "kernels", "machine", "measuring", "research"}
class Hiding:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        allowed = name.partition(".")[0] in ALLOWED or name.startswith("_")
        return self.finder.find_spec(name, path, target) if allowed else None
    def __getattr__(self, name):
        return getattr(self.finder, name)
sys.meta_path[:] = map(Hiding, sys.meta_path)
import torch
import kernels.triton_copier
from research.device.command import Defaults, main
sys.exit(main(sys.argv[1:], Defaults("cpu", (torch.float32,), "tiny-llama", "On a bare machine.")))
"""


def test_a_machine_with_nothing_but_torch_and_triton() -> None:
    """Beside torch's own dependencies; Numba, vLLM and this package's other ones are hidden."""
    command = [sys.executable, "-c", BARE, "--only", "engine", "exactness"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    absent = "vllm, transformers, tokenizers, pydantic, httpx, prometheus_client"
    assert done.stderr.splitlines()[0] == f"tessera: engine and exactness can't be checked without {absent}"
    for line in done.stdout.splitlines()[:2]:
        assert line.split()[1] == "SKIPPED"
        assert f"needs {absent}" in line
    assert done.returncode == 0
