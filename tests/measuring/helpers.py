# SPDX-License-Identifier: Apache-2.0
"""Servers without a model for workloads, and a model folder without a model."""

import re
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers

from measuring.speed.folder import Run, WorkloadRun
from measuring.speed.samples import Sample
from measuring.speed.servers import Server, Servers
from measuring.speed.workloads.base import Workload
from tests.measuring.fake_server import FakeServer, serving

ROUNDS = 3


class Fakes:
    """Stands where ``measuring.speed.servers.running`` stands: pools and placements are as flags say.

    ``state`` is that of servers yet to start, ``states`` has further fields by the server's name.
    """

    def __init__(self, stack: ExitStack) -> None:
        self.state: dict = {}
        self.states: dict[str, dict] = {}
        self.servers: dict[str, FakeServer] = {}
        self.flags: dict[str, tuple[str, ...]] = {}
        self.running: set[str] = set()
        self._stack = stack

    @asynccontextmanager
    async def start(
        self, name: str, model: str, flags: Sequence[str], folder: Path, *, is_stock: bool
    ) -> AsyncIterator[Server]:
        state = {**_state(flags), **self.state, **self.states.get(name, {})}
        fake = self.servers[name] = self._stack.enter_context(serving(**state))
        self.flags[name] = tuple(flags)
        self.running.add(name)
        server = Server(name, SimpleNamespace(url=fake.url, log=folder / f"{name}.log"), is_stock=is_stock, tie=1e-3)
        try:
            async with server:
                yield server
        finally:
            self.running.remove(name)


def _state(flags: Sequence[str]) -> dict:
    """Fields of a server with these flags."""
    given, state = dict(pairwise(flags)), {}
    if given.get("--chunk-cache-memory", "").isdecimal():
        state["pages_total"] = int(given["--chunk-cache-memory"]) // FakeServer.page_bytes
    if (placement := given.get("--chunk-cache-placement")) in ("in-place", "attend"):
        state["report"] = lambda report: {**report, "placement": placement}
    return state


async def run(workload: Workload) -> list[Sample]:
    """The samples of :data:`ROUNDS` rounds."""
    async with Servers("model", (), Path("out")) as servers:
        await workload.prepare(servers)
        samples = [each for number in range(1, 1 + ROUNDS) for each in await workload.round(servers, number)]
        await workload.finish(servers)
    return samples


def make_run(**fields: Any) -> Run:
    """A run of the benchmark."""
    asked = {
        "command": ("tessera", "bench"),
        "model": "m",
        "flags": ("--dtype", "float32"),
        "seed": 0,
        "is_long": False,
    }
    workloads = {"context": WorkloadRun(title="t", axis="a", sizes={"rounds": 5})}
    at = {"tessera": "0.1.0", "cpu": "c", "cores": 2, "started_at": datetime(2025, 1, 1, tzinfo=UTC)}
    return Run(**{**asked, "workloads": workloads, **at, **fields})


def write_tokenizer(folder: Path) -> Path:
    """One token per byte, as the random models have it."""
    alphabet = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def is_gone(log: Path) -> bool:
    """Whether the small server with this log has ended (:mod:`tests.measuring.fake_process`)."""
    return not Path("/proc", re.search("pid ([0-9]+)", log.read_text())[1]).exists()
