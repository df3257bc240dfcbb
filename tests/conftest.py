# SPDX-License-Identifier: Apache-2.0
"""What tests of several packages share, and how they are spread over processes (pytest-xdist, `make test`)."""

import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from app.cluster import shares
from tests.redis_server import RedisServer

_LONGEST = ("engine", "web", "training", "kernels")
"""Folders with the files that take longest."""
_MOST_WORKERS = 4
_WORKER_BYTES = 8 << 30
"""Of a worker and the engines that it keeps running, of 1.8 GB each."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """`-n auto`: as many as there are cores and memory for."""
    memory = round(psutil.virtual_memory().total / _WORKER_BYTES)
    return max(1, min(len(os.sched_getaffinity(0)), memory, _MOST_WORKERS))


def pytest_configure(config: pytest.Config) -> None:
    """Keeps a worker, and with it the engines that it starts, to cores of its own.

    The threads of two engines on the same cores would wait for one another at every step.
    """
    if (worker := getattr(config, "workerinput", None)) is not None:
        cores = shares(sorted(os.sched_getaffinity(0)), worker["workercount"])
        number = int(worker["workerid"].removeprefix("gw"))  # one that replaces another has a number of its own
        os.sched_setaffinity(0, cores[number % len(cores)])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Workers take files in this order: those that take longest first, so that all workers end together."""
    if hasattr(config, "workerinput"):
        items.sort(key=_rank)


def _rank(item: pytest.Item) -> int:
    folders = item.nodeid.split("/")
    return next((rank for rank, name in enumerate(_LONGEST) if name in folders), len(_LONGEST))


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path)
    yield server
    server.stop()


@pytest.fixture(scope="session")
def s3() -> Iterator[str]:
    """The endpoint of a local S3 server with a bucket called `bucket`; its credentials are in the environment."""
    moto = pytest.importorskip("moto.server", reason="moto is not installed")
    boto3 = pytest.importorskip("boto3")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "id")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        server.start()
        host, port = server.get_host_and_port()
        url = f"http://{host}:{port}"
        boto3.client("s3", endpoint_url=url).create_bucket(Bucket="bucket")
        yield url
        server.stop()
