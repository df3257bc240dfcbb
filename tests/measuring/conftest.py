# SPDX-License-Identifier: Apache-2.0
"""Servers without a model."""

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import ClassVar

import pytest

from measuring.speed import servers
from tests.measuring.fake_server import FakeServer, serving
from tests.measuring.helpers import Fakes, write_tokenizer


@pytest.fixture
def fakes(monkeypatch) -> Iterator[Fakes]:
    """Servers without a model, in place of those that a run of the benchmark would start."""
    with ExitStack() as stack:
        fakes = Fakes(stack)
        monkeypatch.setattr(servers, "running", fakes.start)
        monkeypatch.setattr(servers, "SETTLE_S", 0)
        yield fakes


@pytest.fixture
def small_processes(monkeypatch) -> None:
    """Servers without a model, each a process of its own."""
    for name in ("VLLM_SERVE", "TESSERA_SERVE"):
        monkeypatch.setattr(servers, name, ("tests.measuring.fake_process", "serve"))


@pytest.fixture
def server() -> Iterator[FakeServer]:
    """One that answers with the first chunk."""
    with serving(answer=lambda prompt, _: prompt.chunks[0]) as fake:
        yield fake


@pytest.fixture
def model(tmp_path) -> Path:
    """A folder with the tokenizer of a byte-level model."""
    return write_tokenizer(tmp_path / "model")


@pytest.fixture
def process(monkeypatch) -> type:
    """Stands in for ``ServerProcess``, with the log ``says``; it may fail at its start, or have to be killed.

    Noted are the arguments of each, and that it was stopped.
    """

    class Process:
        url, says = "http://127.0.0.1:1", ""
        fails: Exception | None = None
        stuck = False
        noted: ClassVar[list[tuple[str, ...] | str]] = []

        def __init__(self, log, *arguments, port=None):
            self.log = log
            log.write_text(Process.says)
            Process.noted.append(arguments)

        def wait_ready(self):
            if Process.fails:
                raise Process.fails

        def stop(self):
            Process.noted.append("stopped")
            if Process.stuck:
                raise subprocess.TimeoutExpired("tessera", 60)

    monkeypatch.setattr("measuring.kit.servers.ServerProcess", Process)
    return Process
