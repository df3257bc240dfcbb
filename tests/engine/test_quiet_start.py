# SPDX-License-Identifier: Apache-2.0
"""Where a server's start is told: our stages at the terminal, vLLM's details in a file."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from machine.server_process import last_words
from tests.engine.server import TesseraServer

_DETAILS = re.compile(r"^\((?:MainProcess|EngineCore|VllmWorker-\d) pid=\d+\) INFO ", re.M)
_STAGES = ("starting the engine with .+", "loading the weights", "compiling and warming up", "self-check")


def file_named_in(said: str) -> Path:
    (path,) = re.findall(r"^tessera: vLLM's log is in (\S+);", said, re.M)
    return Path(path)


def test_stages_with_their_times_are_told_and_details_are_in_a_file(server: TesseraServer) -> None:
    said = server.log.read_text()
    assert not _DETAILS.search(said)
    times = re.findall(rf"^tessera: ({'|'.join(_STAGES)}): \d+\.\d s$", said, re.M)
    assert [re.fullmatch(stage, time) is not None for stage, time in zip(_STAGES, times, strict=True)] == [True] * 4
    assert f"tessera: ready at {server.url} after " in said
    log = file_named_in(said).read_text()
    for process in ("MainProcess", "EngineCore", "VllmWorker-0"):
        assert re.search(rf"^\({process} pid=\d+\) INFO ", log, re.M)
    warnings = {line for line in log.splitlines() if re.match(r"\(\S+ pid=\d+\) (WARNING|ERROR) ", line)}
    assert warnings
    assert warnings <= set(said.splitlines())


@pytest.mark.matrix
@pytest.mark.serve_with("--documents", "auto", "--log-level", "info")
def test_the_level_info_brings_details_back(server: TesseraServer) -> None:
    said = server.log.read_text()
    assert re.search(r"\(EngineCore pid=\d+\) INFO ", said)
    assert "vLLM's log is in" not in said
    assert re.search(r"^tessera: self-check: \d+\.\d s$", said, re.M)


@pytest.mark.matrix
def test_a_failed_start_says_why_and_where_the_log_is(start: Callable[..., TesseraServer]) -> None:
    server = start("--kv-cache-memory-bytes", "1K")
    assert server.process.wait(300) == 1
    said = server.log.read_text()
    last = last_words(server.log)
    assert last.startswith("tessera: failed: ValueError: ")
    assert last.endswith(f"; vLLM's log is in {file_named_in(said)}")
    assert re.search(r"^\(EngineCore pid=\d+\) ERROR ", said, re.M)
