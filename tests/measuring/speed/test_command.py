# SPDX-License-Identifier: Apache-2.0
"""`tessera bench` from end to end, on small servers: files, exit codes, stopped runs."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from measuring.speed import command, rounds
from measuring.speed.arguments import DEFAULT_FLAGS, parse
from measuring.speed.command import main
from measuring.speed.folder import read_run
from measuring.speed.workloads import WORKLOADS
from tests.measuring.helpers import is_gone
from tests.support.waiting import until

ROOT = Path(__file__).resolve().parents[3]
ROUNDS = 3
COMMAND = """
import sys
from measuring.speed import rounds, servers
from measuring.speed.command import main
rounds._open_claims = lambda _, samples: max(each.round for each in samples) < 4
servers.VLLM_SERVE = servers.TESSERA_SERVE = ("tests.measuring.fake_process", "serve")
servers.SETTLE_S = float(sys.argv.pop(1))
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch) -> None:
    """Servers without a model are equally fast: no number of rounds would decide a claim."""
    monkeypatch.setattr(rounds, "_open_claims", lambda _, samples: max(each.round for each in samples) < ROUNDS)


@pytest.fixture
def out(tmp_path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def argv(model, out) -> list[str]:
    """Options that come after the workloads."""
    return ["--model", str(model), "--output", str(out)]


def last_line(capsys) -> str:
    return capsys.readouterr().err.splitlines()[-1]


def test_a_whole_run(argv, out, fakes, capsys):
    assert main(["context", "chat", *argv, "--max-num-seqs", "4"]) == 0
    captured = capsys.readouterr()
    assert captured.err.splitlines()[-1] == f"tessera: results are in {out}"
    assert "at least 20" in captured.out
    files = ["run.json", "samples.jsonl", "summary.json"]
    assert sorted(file.name for file in out.iterdir()) == files
    run, samples = read_run(out)
    assert (run.complete, run.stopped_by, run.vllm) == (True, None, "0.32.0")
    assert run.flags == (*DEFAULT_FLAGS, "--max-num-seqs", "4")
    assert run.command == ("tessera", "bench", "context", "chat", *argv, "--max-num-seqs", "4")
    assert list(run.workloads) == ["context", "chat"]
    assert len(samples) == ROUNDS * (4 + 2)
    assert fakes.flags == dict.fromkeys(("stock", "tessera"), run.flags)
    assert fakes.running == set()


def test_another_run_is_not_overwritten_unless_told_to(argv, fakes, capsys):
    assert main(["chat", *argv]) == 0
    assert main(["chat", *argv]) == 2
    assert "has run.json of another run; give another --output, or --overwrite" in last_line(capsys)
    assert main(["chat", *argv, "--overwrite"]) == 0


def test_a_different_answer_is_not_reported_and_kept_as_partial(argv, out, fakes, capsys):
    fakes.state = {"report": lambda report: {**report, "mode": "full"}}
    assert main(["chat", "context", *argv]) == 1
    captured = capsys.readouterr()
    assert captured.err.splitlines()[-1] == (
        "tessera: stopped by a request ran as full with chunks hit, not all hit; not reporting; "
        f"6 samples are in {out}, marked as partial"
    )
    assert captured.out == ""
    run, samples = read_run(out)
    assert (run.complete, len(samples)) == (False, 6)
    assert "not reporting" in run.stopped_by
    assert not (out / "summary.json").exists()


def test_a_failure_keeps_and_reports_what_was_measured(argv, out, fakes, capsys):
    def fail(prompt, max_tokens):
        if prompt.chunks:
            raise RuntimeError
        return "x" * max_tokens

    fakes.state = {"answer": fail}
    assert main(["chat", "context", *argv]) == 1
    captured = capsys.readouterr()
    assert re.search(r"stopped by tessera \(its log is .*tessera\.log\).*500", captured.err)
    assert "artial" in captured.out.splitlines()[0]
    assert (out / "summary.json").exists()
    assert not read_run(out)[0].complete


def test_before_the_first_sample_there_is_nothing_to_report(argv, out, fakes, capsys):
    fakes.state = {"answer": lambda prompt, n: ""}
    assert main(["context", *argv]) == 1
    assert "no token arrived; 0 samples are in" in last_line(capsys)
    assert not (out / "summary.json").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["contxt"], "unknown workload 'contxt'; there are context, "),
        (["chat", "--long", "context"], "unexpected 'context': workloads come before options"),
        (["--model", "none"], "--model: no folder none"),
        (["--tokens", "1000"], "argument --tokens: must be multiples of 512"),
        (["--seed", "x"], "argument --seed: invalid int value: 'x'"),
        (["--trace", "none.jsonl"], "none.jsonl: No such file or directory"),
        (["--trace", "bad.jsonl"], "bad.jsonl, line 3: "),
        (["--output", "/proc/none"], "/proc/none: "),
        (["--output"], "argument --output: expected one argument"),
        (["--model", "."], "tokenizer.json: no such file"),
    ],
    ids=str,
)
def test_errors_of_usage_are_one_line(change, message, argv, fakes, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("bad.jsonl").write_text('{"trace": "t", "seed": 0, "chunk_tokens": [64]}\n[0]\n[1]\n')
    assert main([*change, *argv] if change[0][0] != "-" else [*argv, *change]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"tessera: {message}")
    assert (captured.err.count("\n"), captured.out) == (1, "")
    assert fakes.servers == {}


def test_workloads_by_name_and_flags_that_may_be_abbreviations_of_ours():
    assert parse(["--long"]).workloads == list(WORKLOADS)
    assert parse([]).workloads == ["context", "chat", "load"]
    assert parse(["placement"]).workloads == ["placement"]
    assert parse(["chat", "context", "chat", "--long"]).workloads == ["chat", "context"]
    args = parse(["--out", "x", "--lon"])
    assert (args.output, args.long) == (Path("build", "bench"), False)
    assert args.flags == (*DEFAULT_FLAGS, "--out", "x", "--lon")


def test_help_explains_every_workload(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    printed = capsys.readouterr().out
    assert all(f"  {name} " in printed and workload.title in printed for name, workload in WORKLOADS.items())


def test_without_a_model_a_random_one_is_built(model, out, fakes, monkeypatch):
    built = []
    monkeypatch.setattr(command, "build_preset", lambda name: built.append(name) or model)
    assert main(["chat", "--output", str(out)]) == 0
    assert built == ["bench-100m"]
    assert read_run(out)[0].model == str(model)


@pytest.mark.parametrize(
    "sent", [signal.SIGTERM, *(pytest.param(each, marks=pytest.mark.matrix) for each in (signal.SIGINT, signal.SIGHUP))]
)
def test_a_signal_stops_the_servers_and_keeps_what_was_measured(sent, argv, out):
    status, printed, said = signalled(sent, ["0.5", "chat", *argv], out / "samples.jsonl", "\n.*\n")
    assert status == 130, said
    assert said.splitlines()[-1].startswith("tessera: stopped by an interruption; ")
    assert "artial" in printed.splitlines()[0]
    run, samples = read_run(out)
    assert (run.complete, run.stopped_by) == (False, "an interruption")
    assert len(samples) >= 2
    assert (out / "summary.json").exists()
    assert [name for name in ("stock", "tessera") if not is_gone(out / f"{name}.log")] == []


def test_a_signal_while_servers_start_stops_them(argv, out):
    status, _, said = signalled(signal.SIGTERM, ["0", "chat", *argv, "--hang"], out / "stock.log", "pid")
    assert status == 130, said
    assert said.splitlines()[-1] == f"tessera: stopped by an interruption; 0 samples are in {out}, marked as partial"
    assert is_gone(out / "stock.log")


def test_a_terminal_that_is_gone_does_not_end_a_run_that_ignores_it(argv, out):
    status, _, said = signalled(signal.SIGHUP, ["0.01", "chat", *argv], out / "samples.jsonl", ".", "nohup")
    assert status == 0, said
    assert read_run(out)[0].complete


def signalled(sent: int, argv: list[str], file: Path, words: str, *before: str) -> tuple[int, str, str]:
    """Status and output of a run that gets a signal once the file has the words."""
    command = [*before, sys.executable, "-c", COMMAND, *argv]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, text=True, **pipes) as process:
        until(lambda: process.poll() is not None or (file.exists() and re.search(words, file.read_text())))
        process.send_signal(sent)
        printed, said = process.communicate(timeout=60)
    return process.returncode, printed, said
