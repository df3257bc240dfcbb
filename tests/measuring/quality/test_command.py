# SPDX-License-Identifier: Apache-2.0
"""`tessera eval` from end to end, on a small server: results, exit codes, resuming."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import types
from pathlib import Path

import pytest

from app.models.default_model import DEFAULT_DTYPE
from app.models.demo_model import DEMO_MODEL
from measuring.quality.command import main
from tests.measuring.fake_server import RAG, Reply, asked_mode, make_report
from tests.measuring.quality.helpers import make_question, write_questions

FORCED = ("--logits-processors", "measuring.quality.forced:ForcedTokens")
ROOT = Path(__file__).resolve().parents[3]
COMMAND = "import sys; from measuring.quality.command import main; sys.exit(main(sys.argv[1:]))"


@pytest.fixture
def argv(server, tmp_path) -> list[str]:
    """Asks six questions in four modes."""
    questions = write_questions(tmp_path / "questions.jsonl", 6)
    return ["--server", server.url, "--questions", str(questions), "--output", str(tmp_path / "out")]


@pytest.fixture
def out(tmp_path) -> Path:
    return tmp_path / "out"


def results(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]


def rows(out: Path) -> dict[tuple[str, str], dict]:
    """Figures by number of chunks and mode."""
    return {(row["chunks"], row["mode"]): row for row in json.loads((out / "summary.json").read_text())["rows"]}


def last_line(capsys) -> str:
    return capsys.readouterr().err.splitlines()[-1]


def test_a_whole_run_is_only_reported_again(argv, server, out, capsys):
    assert main(argv) == 0
    captured = capsys.readouterr()
    assert "Accuracy" in captured.out
    assert captured.err.splitlines()[-1] == f"tessera: results are in {out}"
    assert sorted(file.name for file in out.iterdir()) == ["accuracy.png", "results.jsonl", "run.json", "summary.json"]
    assert len({(result["question"], result["mode"]) for result in results(out)}) == len(server.asked()) == 24
    modes = [mode for _, mode in server.asked()]  # which take turns at being first
    assert modes[:8] == ["full", "shared", "parallel", "offset", "shared", "parallel", "offset", "full"]
    assert [modes[first] for first in range(8, 24, 4)] == ["parallel", "offset", "full", "shared"]
    assert {chunks for chunks, _ in rows(out)} == {"all", "1", "2", "3"}
    shared = rows(out)["all", "shared"]
    # Every third question has no answer, and this server never refuses.
    assert (shared["answers"], shared["accuracy"]["mean"], shared["difference"]["mean"]) == (6, pytest.approx(2 / 3), 0)
    assert (shared["right_refusals"], shared["false_refusals"]) == (0, 0)
    run = json.loads((out / "run.json").read_text())
    assert (run["questions"], run["served_model"], run["vllm"]) == ("questions.jsonl", "fake", "0.32.0")
    assert run["model"] is None
    assert main(argv) == 0
    assert len(server.asked()) == 24
    assert "tessera: resuming: 24 of 24 answers are there" in capsys.readouterr().err


def test_the_first_questions_in_some_modes_several_at_a_time(argv, server):
    assert main([*argv, "--limit", "2", "--modes", "offset,full", "--max-tokens", "9"]) == 0
    assert [mode for _, mode in server.asked()] == ["full", "offset", "offset", "full"]
    assert {body["max_tokens"] for body in server.bodies(RAG) if body["stream"]} == {9}
    server.before = asyncio.Barrier(3).wait  # never passed by fewer
    assert main([*argv, "--modes", "full", "--concurrency", "3", "--overwrite"]) == 0


def test_answers_in_another_mode_are_counted_with_the_reason(argv, server, out, capsys):
    server.off = "the model has ALiBi"
    server.reply = lambda body: Reply("Latvia", make_report("full", reason="the model has ALiBi"))
    assert main([*argv, "--modes", "full,shared"]) == 0
    captured = capsys.readouterr()
    assert "CHUNK CACHE OFF: no chunk is reused, " in captured.err
    assert "shared: ran in full attention instead, 6 ×: the model has ALiBi" in captured.out
    shared = rows(out)["all", "shared"]
    assert (shared["answers"], shared["fell_back"]) == (0, {"the model has ALiBi": 6})


def test_other_settings_and_other_questions_of_the_same_name_are_refused(argv, tmp_path, capsys):
    assert main(argv) == 0
    assert main([*argv, "--max-tokens", "32"]) == 2
    assert "has results of another run: max_tokens was 64, is 32. give another" in last_line(capsys)
    assert main([*argv, "--max-tokens", "32", "--overwrite"]) == 0
    write_questions(tmp_path / "questions.jsonl", 7)
    assert main([*argv, "--max-tokens", "32"]) == 2
    assert "questions_sha256 was " in last_line(capsys)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--modes", "fast"], "tessera: argument --modes: unknown mode 'fast'"),
        (["--questions", "none.jsonl"], "tessera: none.jsonl: No such file or directory"),
        (["--server", "http://127.0.0.1:9"], "tessera: no server at http://127.0.0.1:9: "),
        (["--output", "/proc/none"], "tessera: /proc/none: "),
    ],
    ids=str,
)
def test_errors_of_usage_are_one_line(argv, change, message, capsys):
    assert main([*argv, *change]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(message)
    assert (captured.err.count("\n"), captured.out) == (1, "")


def test_a_server_that_fails_midway(argv, server, out, capsys):
    def reply(body):
        if len(server.asked()) == 6:
            server.refuse(500, "oops")
        return Reply("Latvia", make_report(asked_mode(body)))

    server.reply = reply
    assert main(argv) == 1
    state = "6 of 24 answers are there; the same command resumes"
    failed = f"the server at {server.url} failed: {RAG}: HTTP 500: no message"
    assert last_line(capsys) == f"tessera: {failed}: {state}"
    assert len(results(out)) == 6
    assert (out / "summary.json").exists()
    server.fixed.clear()
    server.reply = lambda body: Reply("Latvia", make_report(asked_mode(body)))
    assert main(argv) == 0
    assert len(results(out)) == 24
    assert len(server.asked()) == 25


def test_refused_requests_are_counted_and_asked_again(argv, server, out, capsys):
    error = {"message": "too long", "type": "x", "code": 400}
    server.reply = lambda body: Reply("", make_report(asked_mode(body)), error if "2" in str(body) else None)
    assert main([*argv, "--modes", "full"]) == 0
    assert "full: refused by the server, 1 ×: too long" in capsys.readouterr().out
    server.reply = lambda body: Reply("Latvia", make_report("full"))
    assert main([*argv, "--modes", "full"]) == 0
    assert len(server.asked()) == 7
    assert rows(out)["all", "full"]["refused"] == {}


def test_if_every_request_is_refused_there_is_no_result(argv, server, capsys):
    server.refuse_as_vllm(400, "max_tokens is too large")
    assert main([*argv, "--modes", "full"]) == 1
    assert "full: refused by the server, 6 ×: max_tokens is too large" in capsys.readouterr().out


def run_until_held(server, argv: list[str], number: int) -> tuple[int, str, str]:
    """Status, standard output and last line of errors of a process that gets a signal while it waits for an answer.

    Four answers are there by then.
    """
    held, released = threading.Event(), threading.Event()

    async def hold() -> None:
        if len(server.asked()) > 4:
            held.set()
            await asyncio.to_thread(released.wait, 60)

    server.before = hold
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", COMMAND, *argv], env=environment, **pipes, text=True) as process:
        assert held.wait(60)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    released.set()
    server.before = None
    return process.returncode, out, err.splitlines()[-1]


def test_an_interrupted_run_reports_what_it_has_and_resumes(argv, server, out):
    status, told, said = run_until_held(server, argv, signal.SIGINT)
    assert status == 130
    assert "Accuracy" in told
    assert sum(row["answers"] for (chunks, _), row in rows(out).items() if chunks == "all") == 4
    assert said == "tessera: interrupted: 4 of 24 answers are there; the same command resumes"
    assert len(results(out)) == 4
    assert len(server.asked()) == 5
    assert main(argv) == 0
    assert len(results(out)) == 24


def test_a_killed_run_resumes_after_its_torn_line(argv, server, out, capsys):
    status, *_ = run_until_held(server, argv, signal.SIGKILL)
    assert status == -signal.SIGKILL
    whole = results(out)
    assert len(whole) == 4
    with (out / "results.jsonl").open("a") as file:
        file.write('{"question": "q1", "mode": "sha')
    order = server.asked()
    server.requests.clear()
    assert main(argv) == 0
    assert server.asked()[0] == order[-1]  # where it was
    assert "dropped the last line, which was torn" in capsys.readouterr().err
    assert results(out)[:4] == whole
    assert len(results(out)) == 24
    assert len(server.asked()) == 20


def test_an_interruption_before_the_run(argv, monkeypatch, capsys):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("measuring.quality.command.load_questions", interrupt)
    assert main(argv) == 130
    assert capsys.readouterr().err == "tessera: interrupted\n"


@pytest.fixture
def own_server(server, process):
    """The server as the evaluation's own: what it would be started with."""
    process.url = server.url
    return process.noted


def test_a_model_is_served_for_the_time_of_the_run(argv, own_server, out):
    assert main(["some/model", *argv[2:], "--", "--seed", "1"]) == 0
    flags = ("--dtype", DEFAULT_DTYPE, "--seed", "1")
    assert own_server == [("some/model", *flags, *FORCED), "stopped"]
    run = json.loads((out / "run.json").read_text())
    assert (run["model"], run["server_arguments"]) == ("some/model", [*flags])


def test_a_folder_that_cannot_be_is_found_before_the_server_is_started(argv, own_server, capsys):
    assert main(["some/model", *argv[2:], "--output", "/proc/none"]) == 2
    assert capsys.readouterr().err == "tessera: /proc/none: No such file or directory\n"
    assert own_server == []


def test_the_log_is_named_when_the_own_server_fails(argv, own_server, server, out, capsys):
    server.refuse(500, "oops")
    assert main(["some/model", *argv[2:]]) == 1
    assert f"no message (its log is {out}/server.log): 0 of 24 answers are there" in last_line(capsys)
    assert own_server[-1] == "stopped"


def test_the_demo_has_its_own_questions_and_model_or_asks_a_running_server(server, own_server, out, monkeypatch):
    counts = []
    demo_questions = lambda count, numbers: counts.append((count, numbers)) or [make_question()]  # noqa: E731
    demo = types.SimpleNamespace(demo_questions=demo_questions)
    monkeypatch.setitem(sys.modules, "measuring.quality.questions.demo", demo)
    argv = ["--demo", "--output", str(out)]
    assert main(argv) == main([*argv, "--limit", "7", "--chunks", "8,2"]) == 0
    assert counts == [(250, (2, 4, 8, 16)), (7, (2, 8))]
    assert own_server[0] == (str(DEMO_MODEL), "--dtype", DEFAULT_DTYPE, *FORCED)
    assert main([*argv, "--server", server.url, "--overwrite"]) == 0
    assert len(own_server) == 4
