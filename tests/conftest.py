# SPDX-License-Identifier: Apache-2.0
"""Fixtures shared by several rooms, and the tests' distribution over processes (pytest-xdist, `make test`)."""

import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from tests.cores import keep_to_own_cores, num_workers
from tests.processes import let_children_be_interrupted
from tests.real_models import real_model
from tests.redis_server import RedisServer
from tests.selection import lines_changed

# The same examples in every run; FUZZ_EXAMPLES sets their number (`make fuzz`). No time limit per example, since
# machines differ too much.
settings.register_profile(
    "tests", max_examples=int(os.environ.get("FUZZ_EXAMPLES", "100")), derandomize=True, deadline=None, print_blob=True
)
settings.load_profile("tests")

_STARTED = pytest.StashKey[float]()
_LONGEST = ("engine", "web", "training", "kernels")
"""Folders with the slowest files."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--changed-first", action="store_true", help="order files by lines changed in the last commits")
    parser.addoption("--minutes", type=float, metavar="N", help="skip tests that have not started after N minutes")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Number of processes for `-n auto`."""
    return num_workers()


def pytest_configure(config: pytest.Config) -> None:
    let_children_be_interrupted()
    # Tensors are tiny, and a worker has a core of its own: more threads would spin while they wait for each other.
    torch.set_num_threads(1)
    if (worker := getattr(config, "workerinput", None)) is not None:
        keep_to_own_cores(int(worker["workerid"].removeprefix("gw")), worker["workercount"])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Orders files: with ``--changed-first`` as it says, else slowest first, so that all workers end together.

    Tests that share an engine move together, since it starts once.
    """
    if config.option.changed_first:
        changed, most = lines_changed(config.rootpath), Counter[str]()
        for item in items:
            most[group_of(item)] = max(most[group_of(item)], changed[item.nodeid.partition("::")[0]])
        items.sort(key=lambda item: -most[group_of(item)])
    elif hasattr(config, "workerinput"):
        items.sort(key=_rank)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Gives each worker whole files, and all tests of a shared engine together (`--dist loadgroup`)."""
    from xdist.scheduler import LoadGroupScheduling

    class FilesAndEngines(LoadGroupScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return super()._split_scope(nodeid).partition("::")[0]

    return FilesAndEngines(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    limit = item.config.option.minutes
    if limit is not None and time.monotonic() > item.session.stash.setdefault(_STARTED, time.monotonic()) + 60 * limit:
        pytest.skip("not started within the time limit (--minutes)")


def group_of(item: pytest.Item) -> str:
    """The tests that run together: those of a shared engine, or of the same file."""
    marker = item.get_closest_marker("xdist_group")
    return str(marker.args[0]) if marker else item.nodeid.partition("::")[0]


def _rank(item: pytest.Item) -> int:
    folders = item.nodeid.split("/")
    return next((rank for rank, name in enumerate(_LONGEST) if name in folders), len(_LONGEST))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct; skips the test if unavailable."""
    return real_model("smollm2")


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without settings of Tessera or Compose."""
    for name in list(os.environ):
        if name.startswith(("TESSERA_", "COMPOSE_")):
            monkeypatch.delenv(name)


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path)
    yield server
    server.stop()


@pytest.fixture(scope="session")
def s3() -> Iterator[str]:
    """The endpoint of a local S3 server with the bucket `bucket`; credentials are in the environment."""
    moto = pytest.importorskip("moto.server", reason="moto is not installed")
    boto3 = pytest.importorskip("boto3")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "id")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        server.start()
        try:
            host, port = server.get_host_and_port()
            url = f"http://{host}:{port}"
            boto3.client("s3", endpoint_url=url).create_bucket(Bucket="bucket")
            yield url
        finally:
            server.stop()
