# SPDX-License-Identifier: Apache-2.0
"""Engines and models shared by the engine tests."""

import random
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.engine.server import ServerPool, TesseraServer
from tests.oracle import Oracle
from tools.random_model import build_preset

COMMON = (
    "--enforce-eager",
    "--max-model-len",
    "8192",
    "--kv-cache-memory-bytes",
    "256M",
    "--chunk-cache-memory",
    "256MiB",
    "--max-logprobs",
    "300",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/engine/" in str(item.path):
            item.add_marker(pytest.mark.engine)


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("models")

    @cache
    def build(preset: str) -> Path:
        return build_preset(preset, folder / preset)

    return build


@pytest.fixture(scope="session")
def oracle(model_path: Callable[[str], Path]) -> Callable[[str], Oracle]:
    # The servers need the cores; and tiny tensors are slower on two threads than on one.
    torch.set_num_threads(1)
    return cache(lambda preset: Oracle(model_path(preset)))


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerPool]:
    servers = ServerPool(tmp_path_factory.mktemp("servers"))
    yield servers
    servers.close()


@pytest.fixture(scope="module")
def room(pool: ServerPool) -> None:
    """Memory for a module that starts several servers of its own: those of earlier modules end."""
    pool.close()


@pytest.fixture(scope="session")
def serve(pool: ServerPool, model_path: Callable[[str], Path]) -> Callable[..., TesseraServer]:
    """A running server of a preset model: `serve("tiny-llama", "--max-num-seqs", "4")`; fp32 by default."""

    def start(
        preset: str, *flags: str, dtype: str = "float32", environment: dict[str, str] | None = None
    ) -> TesseraServer:
        return pool.get(str(model_path(preset)), "--dtype", dtype, *COMMON, *flags, environment=environment)

    return start


@pytest.fixture(autouse=True)
def books_balance(pool: ServerPool) -> Iterator[None]:
    """After every test, every running server is idle, and its manager's books are checked."""
    yield
    for server in pool.running():
        server.wait_idle()


@pytest.fixture
def text(request: pytest.FixtureRequest) -> Callable[[int], str]:
    """Random lowercase text of a given number of characters, other text in every test."""
    source = random.Random(request.node.nodeid)
    return lambda length: "".join(source.choices("abcdefghijklmnopqrstuvwxyz", k=length))
