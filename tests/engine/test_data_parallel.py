# SPDX-License-Identifier: Apache-2.0
"""Two data-parallel ranks of a model with experts, each with an app of its own; the client balances the load.

vLLM's CPU platform has no collectives for them: `gpu_runtime` adds them.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from machine.server_process import free_port, python_path
from tests.engine.server import TesseraServer, wait_until_gone
from tests.families import FAMILIES, MAX_POSITIONS
from tests.oracle import Oracle
from tests.support.exactness import ask, assert_exact, assert_filled_hit_and_mixed_are_exact, statuses
from tests.support.parallel import RUNTIME, assert_many_requests_at_once_are_exact

pytestmark = pytest.mark.matrix

Text = Callable[[int], str]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return FAMILIES["Qwen3-MoE"].build(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(model: Path) -> Oracle:
    return Oracle(model)


@pytest.fixture(scope="module")
def ranks(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[TesseraServer]]:
    folder, rpc_port = tmp_path_factory.mktemp("ranks"), str(free_port())
    flags = ("--dtype", "float32", "--enforce-eager", "--max-model-len", str(MAX_POSITIONS), "--max-logprobs", "300")
    memory = ("--kv-cache-memory-bytes", "64M", "--chunk-cache-memory", "64MiB")
    tiers = ("--chunk-cache-tiers", f"file://{folder}/kv?size=1GiB")
    address = ("--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", rpc_port)
    environment = {"PYTHONPATH": f"{RUNTIME}{os.pathsep}{python_path()}", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with ExitStack() as stack:
        started = []
        for rank in ("0", "1"):
            size = ("--data-parallel-size", "2", "--data-parallel-rank", rank)
            arguments = (str(model), *flags, *memory, *tiers, *size, *address)
            started.append(server := TesseraServer(folder / f"{rank}.log", *arguments, environment=environment))
            stack.callback(server.stop)
        yield [server.wait_ready() for server in started]  # each waits for the other


def test_each_rank_has_chunks_of_its_own(ranks: list[TesseraServer], expected: Oracle, text: Text) -> None:
    for server in ranks:
        assert_filled_hit_and_mixed_are_exact(server, expected, text)
        assert server.metric("tessera_requests_total") > 0
    with ThreadPoolExecutor(2) as threads:
        each = [threads.submit(assert_many_requests_at_once_are_exact, rank, expected, text, 150) for rank in ranks]
        [future.result() for future in each]


def test_a_rank_loads_the_chunks_of_the_other(ranks: list[TesseraServer], expected: Oracle, text: Text) -> None:
    """The ranks' KV is the same: they share tiers."""
    chunks = [text(100), text(60)]
    ask(ranks[0], "shared", chunks, "What?")
    ranks[0].wait_idle()
    answer: dict[str, Any] = ask(ranks[1], "shared", chunks, "What?")
    assert {chunk["origin"] for chunk in answer["cache"]["chunks"]} <= {"file", None}
    assert "file" in {chunk["origin"] for chunk in answer["cache"]["chunks"]}
    assert_exact(answer, expected, "shared")


def test_the_ranks_of_an_engine_end_together(ranks: list[TesseraServer], text: Text) -> None:
    """Each step of the experts needs all ranks: the other one says so, and ends."""
    first, second = ranks
    assert statuses(ask(first, "shared", [text(50)], "What?")) == ["filled"]
    second.process.kill()
    wait_until_gone(second.process.pid)
    answer = first.client.post("/v1/rag/chat", json={"chunks": [text(80)], "question": "What?", "max_tokens": 4})
    assert answer.status_code == 503
    assert "engine has died" in answer.json()["error"]["message"]
    wait_until_gone(first.process.pid)
