# SPDX-License-Identifier: Apache-2.0
"""The demo model, `tessera demo` and `tessera eval`, on real servers."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from app.models.demo_model import DEMO_MODEL
from machine.server_process import ROOT, free_port
from measuring.quality.command import main as evaluate
from measuring.quality.questions.demo import demo_questions
from measuring.quality.questions.plain_english import CHUNKS
from measuring.quality.questions.questions import Question
from tests.engine.conftest import COMMON
from tests.engine.server import ServerPool, TesseraServer
from tests.oracle import STRATEGIES, Oracle
from tests.processes import started

MAX_TOKENS = 26
EACH = 25
"""Questions of each kind; there are four."""

Results = dict[tuple[str, str], dict[str, Any]]
"""Results by question and mode."""


@pytest.fixture(scope="module")
def server(pool: ServerPool) -> TesseraServer:
    return pool.get(str(DEMO_MODEL), "--dtype", "float32", *COMMON)


@pytest.fixture(scope="module")
def results(server: TesseraServer, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Of `tessera eval --demo`, in each mode."""
    folder = tmp_path_factory.mktemp("eval")
    options = ["--limit", str(EACH), "--max-tokens", str(MAX_TOKENS), "--output", str(folder)]
    assert evaluate(["--demo", "--server", server.url, *options]) == 0
    lines = (folder / "results.jsonl").read_text().splitlines()
    found = {(record["question"], record["mode"]): record for record in map(json.loads, lines)}
    assert len(found) == len(lines) == 4 * EACH * len(STRATEGIES)
    return found


class Reference:
    """The demo model in transformers alone, with the oracle's masks and positions."""

    def __init__(self) -> None:
        self.oracle = Oracle(DEMO_MODEL)
        self.tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)

    def answer(self, question: Question, strategy: str) -> str:
        texts = [
            f"<|system|>{question.system}<|end|><|user|>",
            *(f"{chunk.title}\n{chunk.text}\n\n" if chunk.title else f"{chunk.text}\n\n" for chunk in question.chunks),
            f"{question.question}<|end|><|assistant|>",
        ]
        system, *chunks, tail = self.tokenizer(texts)["input_ids"]
        tokens = self.oracle.answer(strategy, (system, chunks, tail), MAX_TOKENS).tokens
        end = tokens.index(self.tokenizer.eos_token_id) if self.tokenizer.eos_token_id in tokens else MAX_TOKENS
        return self.tokenizer.decode(tokens[:end])


@pytest.mark.matrix
@pytest.mark.parametrize("strategy", ["full", "shared", "offset"])
def test_answers_are_those_of_plain_transformers(strategy, results):
    reference = Reference()
    for question in demo_questions(EACH, numbers=CHUNKS):
        result = results[question.id, strategy]
        assert result["cache"]["mode"] == ("full" if strategy == "full" else "chunked")
        assert result["text"] == reference.answer(question, strategy)


@pytest.mark.matrix
def test_the_model_answers_and_admits_not_to_know(results):
    right = [
        bool(result["answers"]) == ("I don't know" not in result["text"])
        and all(value in result["text"] for value in result["answers"][:1])
        for result in results.values()
    ]
    assert sum(right) / len(right) >= 0.95


def run(*arguments: str, **environment: str) -> "AbstractContextManager[subprocess.Popen[str]]":
    return started(
        [sys.executable, "-m", "app.cli", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "140", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_demo_answers_from_real_documents(smollm2):
    """With SmolLM2; the demo finds the session's copy."""
    with run("demo", "--once", "--port", str(free_port()), TESSERA_HOME=str(smollm2.parent.parent)) as process:
        told, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert "SmolLM2-135M-Instruct has 135 M parameters and is often wrong" in errors
    assert "6/6" in told
    assert told.count("■■■■■■ ") == told.count("full attention") == 5
    for value in ("320 meters", "1987", "veterinarian", "11 kilograms", "6 euros"):
        answers = [line for line in told.splitlines() if value in line]
        assert len(answers) == 2, told  # with chunks reused, and in full attention


@pytest.mark.matrix
def test_without_an_index_the_demo_tells_its_tiny_models_story_and_serves_on(tmp_path):
    port = free_port()
    told = ""
    with run("demo", "--port", str(port), TESSERA_HOME=str(tmp_path), PIP_NO_INDEX="1") as process:
        assert process.stdout
        for line in process.stdout:
            told += line
            if line.startswith("curl"):
                break
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=90)
    assert process.returncode == 130, errors
    assert "serving the tiny demo model instead" in errors
    assert "12/12" in told
    for answer in ("The access code of Falcon is 7342.", "The mayor of Lovik is Sena Maro.", "I don't know."):
        assert told.count(answer) == 2  # with chunks reused, and in full attention
    assert told.count("■■■■■■■■■■■■") == 5  # every chunk of every question is a hit
    assert told.count("full attention") == 5
    assert f"http://127.0.0.1:{port}" in told


@pytest.mark.matrix
def test_the_demo_says_in_one_line_that_the_port_is_taken():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with run("demo", "--port", str(port)) as process:
            _, errors = process.communicate(timeout=90)
    assert process.returncode == 2
    assert f"port {port} is in use; choose another with --port" in errors.splitlines()[-1]


@pytest.fixture
def without_template(tmp_path: Path) -> Path:
    """The demo model without its chat template."""
    folder = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, folder, ignore=shutil.ignore_patterns("chat_template*"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.matrix
def test_a_model_without_a_chat_template_gets_the_flag_that_supplies_one(without_template, tmp_path, capsys):
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"chunks": ["A."], "question": "B?", "answers": ["C"]}\n')
    arguments = [str(without_template), "--questions", str(questions), "--output", str(tmp_path / "out")]
    assert evaluate([*arguments, "--", *COMMON]) == 2
    assert "--chat-template FILE" in capsys.readouterr().err.splitlines()[-1]
