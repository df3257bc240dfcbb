# SPDX-License-Identifier: Apache-2.0
"""Engines of two workers, each with the KV of its heads (tensor parallel) or layers (pipeline parallel), and one that
runs as vLLM runs GPUs by default (`make test-gpu-runtime` runs other tests with it).
"""

import os
from typing import Any

import psutil
import pytest

from machine.server_process import python_path
from tests.cores import all_cores
from tests.engine.server import TesseraServer
from tests.support.exactness import assert_filled_hit_and_mixed_are_exact
from tests.support.parallel import (
    ENVIRONMENT,
    RUNTIME,
    WORKERS,
    Text,
    assert_lost_pages_are_refused,
    assert_many_requests_at_once_are_exact,
)

pytestmark = pytest.mark.matrix

AS_GPUS = "as GPUs"


@pytest.fixture(params=[*WORKERS, AS_GPUS])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def server(kind: str, serve: Any) -> TesseraServer:
    if kind == AS_GPUS:
        environment = {"PYTHONPATH": f"{RUNTIME}{os.pathsep}{python_path()}", "VLLM_SERVER_DEV_MODE": "1"}
        return serve("tiny-llama", environment=environment)
    with all_cores():
        return serve("tiny-llama", *WORKERS[kind], environment=ENVIRONMENT)


def test_filled_hit_and_mixed(kind: str, server: TesseraServer, oracle: Any, text: Text) -> None:
    occupancy, num_workers = server.stats()["occupancy"], 2 if kind in WORKERS else 1
    assert_filled_hit_and_mixed_are_exact(server, oracle("tiny-llama"), text)
    # 4 layers x 2 KV heads x 64 x (K and V) x 4 bytes = 4096 bytes a token, in all workers' 256 MiB together.
    assert occupancy["pages_total"] * occupancy["page_tokens"] * 4096 == num_workers * 256 << 20
    if kind == AS_GPUS:
        log = server.log.read_text()
        assert "GPU runtime: model runner V2, asynchronous scheduling True, executor uni, blocks of 32" in log
        assert 'block_size="32"' in server.client.get("/metrics").text
        names = [" ".join(each.cmdline()) for each in psutil.Process(server.process.pid).children(recursive=True)]
        assert not [name for name in names if "VLLM::Worker" in name]


def test_many_requests_at_once(server: TesseraServer, oracle: Any, text: Text) -> None:
    """A pipeline has several steps in flight."""
    assert_many_requests_at_once_are_exact(server, oracle("tiny-llama"), text)


def test_workers_that_lost_their_pages_refuse_to_load_them(server: TesseraServer, oracle: Any, text: Text) -> None:
    assert_lost_pages_are_refused(server, oracle("tiny-llama"), text)
