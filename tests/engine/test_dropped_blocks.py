# SPDX-License-Identifier: Apache-2.0
"""Models with attention windows, of which vLLM drops blocks: exact, with as many blocks as stock vLLM uses."""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.engine.conftest import COMMON
from tests.engine.server import TesseraServer
from tests.engine.sharing import SMALL_STEPS
from tests.engine.test_exactness import assert_filled_hit_and_mixed_are_exact
from tests.engine.test_parallel import assert_lost_pages_are_refused, assert_many_requests_at_once_are_exact
from tests.families import FAMILIES, MAX_POSITIONS
from tests.oracle import Oracle
from tools.server_process import ServerProcess

Text = Callable[[int], str]
# Prefills take several steps, between which vLLM drops blocks.
STEPS = ("--dtype", "float32", "--max-model-len", str(MAX_POSITIONS), *SMALL_STEPS.args)
FLAGS, STOCK = (*COMMON, *STEPS), ("--enforce-eager", "--kv-cache-memory-bytes", "256M", *STEPS)
VLLM = ("vllm.entrypoints.openai.api_server", "--model")


class Windowed(NamedTuple):
    """A server, its model's folder, and the reference."""

    server: TesseraServer
    model: Path
    oracle: Oracle


@pytest.fixture(scope="module", params=["Gemma 3", pytest.param("Mistral, sliding", marks=pytest.mark.matrix)])
def windowed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Windowed]:
    """With two tables of blocks, or one whose layers all have windows."""
    folder = tmp_path_factory.mktemp("windowed")
    model = FAMILIES[request.param].build(folder / "model")
    with ExitStack() as stack:
        server = TesseraServer(folder / "log", str(model), *FLAGS, environment={"VLLM_SERVER_DEV_MODE": "1"})
        stack.callback(server.stop)
        yield Windowed(server.wait_ready(), model, Oracle(model))


def test_filled_hit_and_mixed(windowed: Windowed, text: Text) -> None:
    assert_filled_hit_and_mixed_are_exact(windowed.server, windowed.oracle, text)


def test_many_requests_at_once(windowed: Windowed, text: Text) -> None:
    assert_many_requests_at_once_are_exact(windowed.server, windowed.oracle, text, longest=180)


def test_workers_that_lost_their_pages_refuse_to_load_them(windowed: Windowed, text: Text) -> None:
    assert_lost_pages_are_refused(windowed.server, windowed.oracle, text)


def test_as_many_blocks_as_in_stock_vllm(windowed: Windowed, text: Text, tmp_path: Path) -> None:
    question = {"max_tokens": 40, "ignore_eos": True, "temperature": 0, "stream": True}
    chunks = [text(150) for _ in range(5)]
    server = windowed.server
    server.chat(chunks=chunks, question="What?", max_tokens=1)
    server.wait_idle()
    blocks, tokens = blocks_in_use(server, "/v1/rag/chat", {"chunks": chunks, "question": "What?", **question})
    assert tokens > 5 * 150
    with ExitStack() as stack:
        stock = ServerProcess(tmp_path / "log", str(windowed.model), *STOCK, serve=VLLM)
        stack.callback(stock.stop)
        stock.wait_ready()
        body = {"model": str(windowed.model), "prompt": [5] * tokens, **question}
        expected, _ = blocks_in_use(stock, "/v1/completions", body)
    assert blocks == pytest.approx(expected, rel=0.05)


def blocks_in_use(server: ServerProcess, path: str, body: dict[str, Any]) -> tuple[float, int]:
    """Most blocks that an answer holds from its first token on, and the tokens of its prompt."""
    most, prompt_tokens = 0.0, 0
    with server.client.stream("POST", path, json={**body, "stream_options": {"include_usage": True}}) as response:
        assert response.status_code == 200, response.read()
        events = (json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {"))
        for event in events:
            most = max(most, used_blocks(server))
            prompt_tokens = (event.get("usage") or {}).get("prompt_tokens", prompt_tokens)
    return most, prompt_tokens


def used_blocks(server: ServerProcess) -> float:
    metrics = server.client.get("/metrics").text
    (share,) = re.findall(r"^vllm:kv_cache_usage_perc\{.*\} (\S+)$", metrics, re.MULTILINE)
    (number,) = re.findall(r'^vllm:cache_config_info\{.*num_gpu_blocks="(\d+)"', metrics, re.MULTILINE)
    return float(share) * int(number)
