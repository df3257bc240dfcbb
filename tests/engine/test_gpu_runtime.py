# SPDX-License-Identifier: Apache-2.0
"""An engine run as vLLM runs GPUs by default; `make test-gpu-runtime` runs other tests with it."""

import os
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from machine.server_process import python_path
from tests.engine.server import TesseraServer
from tests.support.exactness import ask, assert_exact, assert_filled_hit_and_mixed_are_exact, statuses
from tests.support.parallel import RUNTIME, assert_many_requests_at_once_are_exact

Text = Callable[[int], str]
pytestmark = pytest.mark.matrix


@pytest.fixture
def server(serve: Any) -> TesseraServer:
    return serve("tiny-llama", environment={"PYTHONPATH": f"{RUNTIME}{os.pathsep}{python_path()}"})


def test_it_is_what_gpus_have(server: TesseraServer) -> None:
    log = server.log.read_text()
    assert "GPU runtime: model runner V2, asynchronous scheduling True, executor uni, blocks of 32" in log
    assert 'block_size="32"' in server.client.get("/metrics").text
    names = [" ".join(each.cmdline()) for each in psutil.Process(server.process.pid).children(recursive=True)]
    assert not [name for name in names if "VLLM::Worker" in name]


def test_filled_hit_and_mixed(server: TesseraServer, oracle: Any, text: Text) -> None:
    assert_filled_hit_and_mixed_are_exact(server, oracle("tiny-llama"), text)


def test_many_requests_at_once(server: TesseraServer, oracle: Any, text: Text) -> None:
    assert_many_requests_at_once_are_exact(server, oracle("tiny-llama"), text)


@pytest.mark.parametrize(("placement", "layout"), [("copy", "NHD"), ("attend", "NHD"), ("attend", "HND")])
def test_a_gpus_attention_and_kernels(placement: str, layout: str, serve: Any, oracle: Any, text: Text) -> None:
    environment = {
        "PYTHONPATH": f"{RUNTIME}{os.pathsep}{python_path()}",
        "GPU_RUNTIME_ATTENTION": "triton",
        "VLLM_KV_CACHE_LAYOUT": layout,
    }
    server = serve("tiny-llama", "--chunk-cache-placement", placement, "--block-size", "16", environment=environment)
    chunks = [text(40), text(23)]
    for strategy, asked in (("offset", chunks), ("shared", chunks[::-1]), ("offset", [text(17), *chunks])):
        answer = ask(server, strategy, asked, "Which?")
        assert_exact(answer, oracle("tiny-llama"), strategy)
    assert statuses(answer) == ["filled", "hit", "hit"]
    assert server.stats()["placement"] == placement
