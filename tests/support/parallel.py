# SPDX-License-Identifier: Apache-2.0
"""Engines with several workers."""

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.engine.server import TesseraServer
from tests.oracle import Oracle
from tests.support.exactness import STRATEGIES, ask, assert_exact, assert_scored, statuses

Text = Callable[[int], str]


# vLLM's CPU build runs a pipeline only with a compiled model: eager mode never creates the second stage's buffers.
WORKERS = {
    "tensor parallel": ("--tensor-parallel-size", "2"),
    "pipeline parallel": ("--pipeline-parallel-size", "2", "--no-enforce-eager"),
}
RUNTIME = Path(__file__).parents[1] / "engine" / "gpu_runtime"
"""In the environment of a server that runs the CPU as vLLM runs GPUs."""
ENVIRONMENT = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "VLLM_SERVER_DEV_MODE": "1"}


def assert_many_requests_at_once_are_exact(
    server: TesseraServer, oracle: Oracle, text: Text, longest: int = 500
) -> None:
    """Fills, loads and decoding in the same steps."""
    source, system = random.Random(1), text(20)
    chunks = [text(source.randrange(20, longest)) for _ in range(8)]
    requests = [(STRATEGIES[i % 3], source.sample(chunks, source.randrange(1, 5)), text(40)) for i in range(24)]
    with ThreadPoolExecutor(len(requests)) as threads:
        responses = list(threads.map(lambda r: ask(server, *r, system=system), requests))
    for (strategy, *_), response in zip(requests, responses, strict=True):
        assert_exact(response, oracle, strategy)
    assert {status for response in responses for status in statuses(response)} > {"filled"}
    again = ask(server, *requests[0], system=system)
    assert set(statuses(again)) == {"hit"}
    assert_exact(again, oracle, requests[0][0])


def assert_lost_pages_are_refused(server: TesseraServer, oracle: Oracle, text: Text) -> None:
    """Needs a server with ``VLLM_SERVER_DEV_MODE``."""
    chunks, system = [text(200), text(37)], text(20)
    assert statuses(ask(server, "shared", chunks, text(15), system=system)) == ["filled"] * 2
    lost = server.client.post("/collective_rpc", json={"method": "chunk_cache_forget"})
    assert lost.status_code == 200, lost.text
    refused = ask(server, "shared", chunks, text(15), system=system)
    reason = "a worker refused to load the cached chunks"
    assert (refused["cache"]["mode"], refused["cache"]["reason"]) == ("full", reason)
    assert_scored(refused, oracle)
    for status in ("filled", "hit"):
        response = ask(server, "shared", chunks, text(15), system=system)
        assert statuses(response) == [status] * 2
        assert_exact(response, oracle, "shared")
