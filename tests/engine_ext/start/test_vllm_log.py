# SPDX-License-Identifier: Apache-2.0
"""Where vLLM's log goes, and the stages of a start that it tells of."""

import logging
import os
import time

import pytest

from engine_ext.start import vllm_log
from engine_ext.start.stages import CHECKING, LOADING, WARMING, StartStages
from engine_ext.start.vllm_log import LogFile, log_file, log_to_file


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("TESSERA_HOME", str(tmp_path))
    return tmp_path


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
