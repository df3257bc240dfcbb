# SPDX-License-Identifier: Apache-2.0
"""`tessera eval` from end to end, on a small server: results, exit codes, resuming."""

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
from measuring.quality.command import main
from tests.measuring.quality.helpers import (
    TEMPLATE_ERROR,
    Reply,
    asked_mode,
    make_question,
    make_report,
    write_questions,
)

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


def last_line(capsys) -> str:
    return capsys.readouterr().err.splitlines()[-1]


def test_a_whole_run(argv, server, out, capsys):
    assert main(argv) == 0
    captured = capsys.readouterr()
    assert "Accuracy" in captured.out
    assert captured.err.splitlines()[-1] == f"tessera: results are in {out}"
    assert sorted(file.name for file in out.iterdir()) == ["accuracy.png", "results.jsonl", "run.json", "summary.json"]
    assert len({(result["question"], result["mode"]) for result in results(out)}) == 24
    rows = {(row["chunks"], row["mode"]): row for row in json.loads((out / "summary.json").read_text())["rows"]}
    assert {chunks for chunks, _ in rows} == {"all", "1", "2", "3"}
    shared = rows["all", "shared"]
    # Every third question has no answer, and this server never refuses.
    assert (shared["answers"], shared["accuracy"]["mean"], shared["difference"]["mean"]) == (6, pytest.approx(2 / 3), 0)
    assert (shared["right_refusals"], shared["false_refusals"]) == (0, 0)
    run = json.loads((out / "run.json").read_text())
    assert (run["questions"], run["served_model"], run["vllm"], run["model"]) == (
        "questions.jsonl",
        "m",
        "0.32.0",
        None,
    )


def test_a_finished_run_is_only_reported_again(argv, server, capsys):
    assert main(argv) == 0
    asked = len(server.requests)
    assert main(argv) == 0
    assert len(server.requests) == asked
    assert "tessera: resuming: 24 of 24 answers are there" in capsys.readouterr().err


def test_the_first_questions_in_some_modes(argv, server):
    assert main([*argv, "--limit", "2", "--modes", "offset,full", "--max-tokens", "9"]) == 0
    assert [mode for _, mode in server.asked()] == ["full", "offset", "offset", "full"]
    assert {body["max_tokens"] for body in server.requests} == {9}


def test_answers_in_another_mode_are_counted_with_the_reason(argv, server, out, capsys):
    server.stats = {"enabled": False, "reason": "the model has ALiBi"}
    server.reply = lambda body: Reply("Latvia", make_report("full", reason="the model has ALiBi"))
    assert main([*argv, "--modes", "full,shared"]) == 0
    captured = capsys.readouterr()
    assert "CHUNK CACHE OFF: no chunk is reused, " in captured.err
    assert "shared: ran in full attention instead, 6 ×: the model has ALiBi" in captured.out
    shared = json.loads((out / "summary.json").read_text())["rows"][1]
    assert (shared["mode"], shared["answers"], shared["fell_back"]) == ("shared", 0, {"the model has ALiBi": 6})


def test_other_settings_are_refused(argv, capsys):
    assert main(argv) == 0
    assert main([*argv, "--max-tokens", "32"]) == 2
    assert "has results of another run: max_tokens was 64, is 32. give another" in last_line(capsys)
    assert main([*argv, "--max-tokens", "32", "--overwrite"]) == 0


def test_other_questions_of_the_same_name_are_refused(argv, tmp_path, capsys):
    assert main(argv) == 0
    write_questions(tmp_path / "questions.jsonl", 7)
    assert main(argv) == 2
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


def test_a_malformed_question_file_is_named(argv, tmp_path, capsys):
    (tmp_path / "questions.jsonl").write_text('{"chunks": [7], "question": "Which?", "answers": []}')
    assert main(argv) == 2
    assert last_line(capsys).endswith("questions.jsonl, line 1, chunks.0: must be a string or an object with a text")


def test_a_missing_chat_template_is_an_error_of_set_up(argv, server, capsys):
    server.refuse_as_vllm(400, TEMPLATE_ERROR)
    assert main(argv) == 2
    assert last_line(capsys).endswith("(start the server with --chat-template FILE)")


def test_a_server_that_fails_midway(argv, server, out, capsys):
    def reply(body):
        if len(server.requests) == 6:
            server.refuse(500, "oops")
        return Reply("Latvia", make_report(asked_mode(body)))

    server.reply = reply
    assert main(argv) == 1
    state = "6 of 24 answers are there; the same command resumes"
    assert (
        last_line(capsys) == f"tessera: the server at {server.url} failed: /v1/rag/chat: HTTP 500: no message: {state}"
    )
    assert len(results(out)) == 6
    assert (out / "summary.json").exists()
    server.refusals.clear()
    assert main(argv) == 0
    assert len(server.requests) == len(results(out)) == 24


def test_refused_requests_are_counted_and_asked_again(argv, server, out, capsys):
    error = {"message": "too long", "type": "x", "code": 400}
    server.reply = lambda body: Reply("", make_report(asked_mode(body)), error=error if "2" in str(body) else None)
    assert main([*argv, "--modes", "full"]) == 0
    assert "full: refused by the server, 1 ×: too long" in capsys.readouterr().out
    server.reply = lambda body: Reply("Latvia", make_report("full"))
    assert main([*argv, "--modes", "full"]) == 0
    assert len(server.requests) == 7
    assert json.loads((out / "summary.json").read_text())["rows"][0]["refused"] == {}


def test_if_every_request_is_refused_there_is_no_result(argv, server, capsys):
    server.refuse_as_vllm(400, "max_tokens is too large")
    assert main([*argv, "--modes", "full"]) == 1
    assert "full: refused by the server, 6 ×: max_tokens is too large" in capsys.readouterr().out


class Holding:
    """Answers some requests; from then on it holds them until :meth:`release`."""

    def __init__(self, server, answered: int) -> None:
        self._server, self._answered = server, answered
        self._held, self._released = threading.Event(), threading.Event()

    def __call__(self, body: dict) -> Reply:
        hold = len(self._server.requests) > self._answered
        return Reply("Latvia", make_report(asked_mode(body)), before=self._hold if hold else lambda: None)

    def _hold(self) -> None:
        self._held.set()
        self._released.wait(60)

    def wait(self) -> None:
        assert self._held.wait(60)

    def release(self) -> None:
        self._released.set()


def run_until_held(server, argv: list[str], number: int) -> tuple[int, str, str]:
    """Exit code, standard output and last line of errors of a process that gets a signal after four answers."""
    server.reply = holding = Holding(server, 4)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", COMMAND, *argv]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=environment, **pipes, text=True) as process:
        holding.wait()
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    holding.release()
    return process.returncode, out, err.splitlines()[-1]


def test_an_interrupted_run_reports_what_it_has_and_resumes(argv, server, out):
    status, told, said = run_until_held(server, argv, signal.SIGINT)
    assert status == 130
    assert "Accuracy" in told
    assert sum(row["answers"] for row in json.loads((out / "summary.json").read_text())["rows"][:4]) == 4
    assert said == "tessera: interrupted: 4 of 24 answers are there; the same command resumes"
    assert len(results(out)) == 4
    assert main(argv) == 0
    assert len(results(out)) == 24


def test_a_killed_run_resumes_after_its_torn_line(argv, server, out, capsys):
    status, *_ = run_until_held(server, argv, signal.SIGKILL)
    assert status == -signal.SIGKILL
    whole = results(out)
    assert len(whole) == 4
    with (out / "results.jsonl").open("a") as file:
        file.write('{"question": "q1", "mode": "sha')
    server.requests.clear()
    assert main(argv) == 0
    assert "dropped the last line, which was torn" in capsys.readouterr().err
    assert results(out)[:4] == whole
    assert len(results(out)) == 24
    assert len(server.requests) == 20


def test_an_interruption_before_the_run(argv, monkeypatch, capsys):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("measuring.quality.command.load_questions", interrupt)
    assert main(argv) == 130
    assert capsys.readouterr().err == "tessera: interrupted\n"


@pytest.fixture
def own_server(server, monkeypatch):
    """The server as the evaluation's own: what it would be started with."""
    started = []

    class Process:
        url = server.url

        def __init__(self, log, *arguments, port=None):
            log.touch()
            started.append(arguments)

        def wait_ready(self): ...

        def stop(self):
            started.append("stopped")

    monkeypatch.setattr("measuring.kit.servers.ServerProcess", Process)
    return started


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


@pytest.fixture
def demo(monkeypatch):
    """``measuring.quality.questions.demo`` with one question; the counts it is asked for."""
    counts = []
    demo_questions = lambda count, numbers: counts.append((count, numbers)) or [make_question()]  # noqa: E731
    monkeypatch.setitem(
        sys.modules, "measuring.quality.questions.demo", types.SimpleNamespace(demo_questions=demo_questions)
    )
    return counts


def test_the_demo_has_its_own_questions_and_model(demo, own_server, out):
    from app.models.demo_model import DEMO_MODEL

    assert main(["--demo", "--output", str(out)]) == 0
    assert main(["--demo", "--output", str(out), "--limit", "7", "--chunks", "8,2"]) == 0
    assert demo == [(250, (2, 4, 8, 16)), (7, (2, 8))]
    assert own_server[0] == (str(DEMO_MODEL), "--dtype", DEFAULT_DTYPE, *FORCED)


def test_the_demo_can_ask_a_running_server(demo, server, out):
    assert main(["--demo", "--server", server.url, "--output", str(out)]) == 0
    assert len(server.requests) == 4
