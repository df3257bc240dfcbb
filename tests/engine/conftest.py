# SPDX-License-Identifier: Apache-2.0
"""Engines and models shared by the engine tests."""

import random
from collections.abc import Callable, Generator, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from app.models.random_model import build_preset
from machine.server_process import TESSERA_SERVE
from tests.engine.server import ServerPool, TesseraServer
from tests.engine.sharing import Engine, SharedServer, engine_of, in_order
from tests.oracle import Oracle
from tests.processes import end

MAX_MODEL_LEN = 8192
COMMON = ("--enforce-eager", "--max-model-len", str(MAX_MODEL_LEN), "--max-logprobs", "300")
COMMON += ("--kv-cache-memory-bytes", "256M", "--chunk-cache-memory", "256MiB")
ALWAYS_FETCHING = ("tests.engine.always_fetching", "serve")
"""Starts servers that fetch and load, however quickly they could compute."""


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.engine)
    if engine := engine_of(item):
        item.add_marker(pytest.mark.xdist_group(" ".join(engine)))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = [place for place, item in enumerate(items) if "tests/engine/" in str(item.path)]
    for place, item in zip(places, in_order([items[place] for place in places]), strict=True):
        items[place] = item


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None]:
    """Ends a shared engine with its last test."""
    shared: SharedServer | None = item.funcargs.get("shared")
    try:
        return (yield)
    finally:
        if shared is not None:
            shared.keep(engine_of(nextitem) if nextitem is not None else None)


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("models")

    @cache
    def build(preset: str) -> Path:
        return build_preset(preset, folder / preset)

    return build


@pytest.fixture(scope="session")
def oracle(model_path: Callable[[str], Path]) -> Callable[[str], Oracle]:
    return cache(lambda preset: Oracle(model_path(preset)))


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory, model_path: Callable[[str], Path]) -> Iterator[SharedServer]:
    def start(engine: Engine) -> TesseraServer:
        preset, *flags = engine
        log = tmp_path_factory.mktemp("shared") / "server.log"
        flags = [flag.replace("{folder}", str(log.parent / "kv")) for flag in flags]
        serve = ALWAYS_FETCHING if "--chunk-cache-tiers" in flags else TESSERA_SERVE
        return TesseraServer(log, *arguments_of(model_path(preset)), *flags, serve=serve).wait_ready()

    server = SharedServer(start)
    yield server
    server.keep(None)


@pytest.fixture
def shared_engine(request: pytest.FixtureRequest) -> Engine:
    engine = engine_of(request.node)
    assert engine is not None
    return engine


@pytest.fixture
def server(shared: SharedServer, shared_engine: Engine) -> TesseraServer:
    """A running server, shared with all tests of the same model and flags (`serve_with`); fp32 by default."""
    return shared.get(shared_engine)


@pytest.fixture
def mortal(shared: SharedServer, shared_engine: Engine) -> Iterator[TesseraServer]:
    """The server of the fixture `server`, for the test that ends it."""
    server = shared.take(shared_engine)
    yield server
    end(server.process)


@pytest.fixture
def start(tmp_path: Path, model_path: Callable[[str], Path]) -> Iterator[Callable[..., TesseraServer]]:
    """Starts servers for one test, and returns before they are ready: `start("--no-chunk-cache")`."""
    started: list[TesseraServer] = []

    def start_server(*flags: str, **options: Any) -> TesseraServer:
        log = tmp_path / f"server-{len(started)}.log"
        started.append(TesseraServer(log, *arguments_of(model_path("tiny-llama")), *flags, **options))
        return started[-1]

    yield start_server
    for server in started:
        end(server.process)


@pytest.fixture
def start_with_tiers(start: Callable[..., TesseraServer]) -> Callable[..., TesseraServer]:
    """Servers with tiers for one test, which are ready: `start_with_tiers("host://?size=1GiB")`."""

    def start_server(tiers: str, *flags: str, **options: Any) -> TesseraServer:
        return start("--chunk-cache-tiers", tiers, *flags, **{"serve": ALWAYS_FETCHING, **options}).wait_ready()

    return start_server


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerPool]:
    """Servers of one file of tests."""
    servers = ServerPool(tmp_path_factory.mktemp("servers"))
    yield servers
    servers.close()


@pytest.fixture(scope="module")
def serve(pool: ServerPool, model_path: Callable[[str], Path]) -> Callable[..., TesseraServer]:
    """A running server of a preset model, for one file of tests: `serve("tiny-llama", "--profile", str(path))`."""

    def start(preset: str, *flags: str, environment: dict[str, str] | None = None) -> TesseraServer:
        return pool.get(*arguments_of(model_path(preset)), *flags, environment=environment)

    return start


def arguments_of(model: Path) -> list[str]:
    return [str(model), "--dtype", "float32", *COMMON]


@pytest.fixture(autouse=True)
def books_balance(shared: SharedServer, pool: ServerPool) -> Iterator[None]:
    """After every test, waits until all running servers are idle, and checks their managers' books."""
    yield
    for server in (*shared.running(), *pool.running()):
        server.wait_idle()


@pytest.fixture
def text(request: pytest.FixtureRequest) -> Callable[[int], str]:
    """Random lowercase text of a given length, different in every test."""
    source = random.Random(request.node.nodeid)
    return lambda length: "".join(source.choices("abcdefghijklmnopqrstuvwxyz", k=length))
