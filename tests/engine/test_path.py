# SPDX-License-Identifier: Apache-2.0
"""The files that one cached request enters in the app's process."""

import json
import os
import signal
from pathlib import Path

import pytest

from tests.support.waiting import until

pytestmark = pytest.mark.engine

TRACER = Path(__file__).parent / "path_tracer"
MOST_FILES = 30


def test_a_cached_request_enters_few_files(serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    listed = tmp_path / "entered.json"
    path = os.pathsep.join(filter(None, (str(TRACER), os.environ.get("PYTHONPATH"))))
    server = serve("tiny-llama", environment={"ENTERED_FILES": str(listed), "PYTHONPATH": path})
    body = {"system": "Answer.", "chunks": ["The bridge is long.", "The mill is old."], "question": "Which?"}
    for _ in range(2):
        server.chat(**body, max_tokens=4)
    server.wait_idle()
    os.kill(server.process.pid, signal.SIGUSR1)
    answer = server.chat(**body, max_tokens=4)
    os.kill(server.process.pid, signal.SIGUSR2)
    until(lambda: listed.exists() and listed.stat().st_size > 0)
    entered: list[str] = json.loads(listed.read_text())
    files = list(dict.fromkeys(entered))
    with capsys.disabled():
        print(f"\n{len(files)} files, {len(entered)} changes of file:", *files, sep="\n  ")
    assert [chunk["status"] for chunk in answer["cache"]["chunks"]] == ["hit", "hit"]
    assert len(files) <= MOST_FILES
