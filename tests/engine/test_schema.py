# SPDX-License-Identifier: Apache-2.0
"""Requests generated from the server's OpenAPI page: no status 5xx, and every response matches the page.

Some hundreds per test run. `make fuzz` sends thousands (SCHEMA_CASES), including systematic cases that omit each field
or set it to its bounds.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from machine.server_process import ROOT
from tests.engine.server import TesseraServer

pytest.importorskip("schemathesis", reason="schemathesis is not installed")

CASES = int(os.environ.get("SCHEMA_CASES", "300"))
IS_LONG = CASES > 1000
CONFIG = Path(__file__).parent / "schemathesis.toml"


def test_every_answer_is_as_the_openapi_page_says(server: TesseraServer) -> None:
    num_operations = sum(len(operations) for operations in server.get("/openapi.json")["paths"].values())
    phases = "examples,coverage,fuzzing,stateful" if IS_LONG else "examples,fuzzing,stateful"
    run = subprocess.run(
        [
            *(sys.executable, "-m", "schemathesis.cli", "--config-file", str(CONFIG), "run"),
            *("--phases", phases, "--max-examples", str(CASES // num_operations + 2)),
            f"{server.url}/openapi.json",
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    print(run.stdout[-20_000:], run.stderr[-2000:])
    assert run.returncode == 0
    generated = re.search(r"(\d+) generated", run.stdout)
    assert generated is not None
    assert int(generated[1]) >= CASES
    assert server.client.get("/health").status_code == 200
