# SPDX-License-Identifier: Apache-2.0
"""Where vLLM's log goes, and the stages of a start that it tells of."""

import importlib.util
import logging
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engine_ext.start import vllm_log
from engine_ext.start.stages import CHECKING, LOADING, STAGES, WARMING, StartStages
from engine_ext.start.vllm_log import LogFile, log_file, log_to_file

ROOT = Path(__file__).parents[3]
_TWO_PROCESSES = """
import json, logging, multiprocessing, os
from logging.config import dictConfig
from pathlib import Path

def log():
    dictConfig(json.loads(Path(os.environ["VLLM_LOGGING_CONFIG_PATH"]).read_text()))
    name = multiprocessing.current_process().name
    logging.getLogger("vllm.engine").info("a detail of %s", name)
    logging.getLogger("vllm.engine").warning("a warning of %s", name)

if __name__ == "__main__":
    log()
    child = multiprocessing.get_context("spawn").Process(target=log, name="EngineCore")
    child.start()
    child.join()
"""


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("TESSERA_HOME", str(tmp_path))
    return tmp_path


def test_details_of_all_processes_go_to_the_file_and_warnings_to_the_terminal_too(tmp_path):
    environment = {}
    file = log_to_file(["model"], environment)
    script = tmp_path / "script.py"
    script.write_text(_TWO_PROCESSES)
    run = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, **environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    messages = [line.rpartition("] ")[2] for line in file.read_text().splitlines()]
    assert messages == [
        f"a {kind} of {name}" for name in ("MainProcess", "EngineCore") for kind in ("detail", "warning")
    ]
    assert [line.rpartition("] ")[2] for line in run.stderr.splitlines()] == messages[1::2]
    assert run.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "given", "level"),
    [
        (["m", "--log-level", "info"], {}, "INFO"),
        (["m", "--log_level=DEBUG"], {}, "DEBUG"),
        (["m", "--logging-config.formatter", "json"], {}, "WARNING"),
        (["m", "--distributed-executor-backend", "ray"], {}, "WARNING"),
        (["m"], {"VLLM_LOGGING_LEVEL": "ERROR"}, "ERROR"),
        (["m"], {"VLLM_LOGGING_CONFIG_PATH": "/mine.json"}, "WARNING"),
        (["m"], {"VLLM_CONFIGURE_LOGGING": "0"}, "WARNING"),
    ],
)
def test_whoever_configures_vllms_log_gets_it_as_configured(arguments, given, level, home):
    environment = dict(given)
    assert log_to_file(arguments, environment) is None
    assert environment == {"VLLM_LOGGING_LEVEL": level, **given}
    assert not (home / "vllm").exists()


def test_each_port_has_a_file_that_begins_anew_and_old_ones_go(home):
    first = log_to_file(["m", "--port", "8001", "--log-format", "json"], {})
    assert first.parent == home / "vllm"
    assert first.stem.endswith("-8001")
    assert log_to_file(["m", "--port=8002"], {}) != first
    first.write_text("before")
    assert log_to_file(["m", "--port", "8001"], {}) == first
    assert first.read_text() == ""
    assert first.with_suffix(".previous.log").read_text() == "before"
    long_ago = time.time() - 30 * 86400
    os.utime(first, (long_ago, long_ago))
    log_to_file(["m"], {})
    assert not first.exists()


def test_processes_go_on_in_a_new_file_when_one_finds_it_full(tmp_path, monkeypatch):
    path = tmp_path / "vllm.log"
    monkeypatch.setenv("_TESSERA_VLLM_LOG", str(path))
    monkeypatch.setattr(vllm_log, "_MAX_BYTES", 30)
    handlers = [LogFile(), LogFile()]
    for number in range(6):
        handlers[number % 2].emit(logging.makeLogRecord({"msg": f"record number {number}"}))
    for handler in handlers:
        handler.close()
    kept = path.with_suffix(".previous.log").read_text() + path.read_text()
    assert kept.splitlines() == [f"record number {number}" for number in range(2, 6)]
    assert log_file() == path


def test_the_stages_words_are_those_of_the_installed_vllm():
    folder = Path(importlib.util.find_spec("vllm").origin).parent
    sources = [
        path.read_text()
        for part in ("v1/worker", "model_executor/model_loader")
        for path in (folder / part).rglob("*.py")
    ]
    for words in STAGES:
        assert any(re.search(f'"{words}', source) for source in sources), words


def test_a_stage_begins_once_and_none_comes_back():
    begun = []
    stages = StartStages(begun.append)
    for words in (
        "Loading model from scratch...",
        "another line",
        "Loading weights took 1 s",
        "Starting to load model m",
    ):
        stages.read(f"(Worker pid=1) INFO [file:1] {words}")
    stages.begin(CHECKING)
    stages.read("Model loading took 2 GiB memory")
    assert begun == [LOADING, WARMING, CHECKING]
