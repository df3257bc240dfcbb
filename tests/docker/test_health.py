# SPDX-License-Identifier: Apache-2.0
"""Health checks of the images and the router's service, run against small servers."""

import subprocess
import sys

import pytest
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

from machine.server_process import ROOT, free_port
from tests.docker.deployment import SOURCES, health_check, services
from tests.serving import served

CHECKS = {name: health_check(services("cpu")[name]) for name in ("router", "cpu-1")}
"""The other images have the same check: test_dockerfiles.py."""


@pytest.fixture(params=CHECKS)
def check(request):
    """Runs a health check against another port as in its container; returns its result."""
    program, script, _ = CHECKS[request.param]
    assert program == "python3"
    script = script.replace(str(SOURCES), str(ROOT))

    def check(port: int) -> subprocess.CompletedProcess[str]:
        proxies = {"http_proxy": "http://127.0.0.1:9", "HTTP_PROXY": "http://127.0.0.1:9"}  # Docker may set them
        command = [sys.executable, script, str(port)]
        return subprocess.run(command, env=proxies, timeout=30, capture_output=True, text=True, check=False)

    return check


@pytest.mark.parametrize("status", [200, 404, 500, 503])
def test_a_server_is_well_or_not(check, status):
    with served(Starlette(routes=[Route("/health", lambda _: Response(status_code=status))])) as url:
        checked = check(int(url.rpartition(":")[2]))
    said = "" if status == 200 else f"GET /health: status {status}\n"
    assert (checked.returncode, checked.stderr) == (int(status != 200), said)


def test_no_server(check):
    checked = check(free_port())
    assert checked.returncode == 1
    assert "ConnectionRefusedError" in checked.stderr
