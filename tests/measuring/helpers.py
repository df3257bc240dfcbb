# SPDX-License-Identifier: Apache-2.0
"""Servers without a model for workloads, and a model folder without a model."""

from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

from measuring.speed.samples import Sample
from measuring.speed.servers import Server, Servers
from measuring.speed.workloads.base import Workload
from tests.measuring.fake_server import FakeServer, serving


class Fakes:
    """Stands where ``measuring.speed.servers.running`` stands. ``state`` is that of servers yet to start."""

    def __init__(self, stack: ExitStack) -> None:
        self.state: dict = {}
        self.servers: dict[str, FakeServer] = {}
        self.flags: dict[str, tuple[str, ...]] = {}
        self.running: set[str] = set()
        self._stack = stack

    @asynccontextmanager
    async def start(
        self, name: str, model: str, flags: Sequence[str], folder: Path, *, is_stock: bool
    ) -> AsyncIterator[Server]:
        fake = self.servers[name] = self._stack.enter_context(serving(**self.state))
        self.flags[name] = tuple(flags)
        self.running.add(name)
        server = Server(name, SimpleNamespace(url=fake.url, log=folder / f"{name}.log"), is_stock=is_stock, tie=1e-3)
        try:
            async with server:
                yield server
        finally:
            self.running.remove(name)


ROUNDS = 3


async def run(workload: Workload) -> list[Sample]:
    """The samples of :data:`ROUNDS` rounds."""
    async with Servers("model", (), Path("out")) as servers:
        await workload.prepare(servers)
        samples = [each for number in range(1, 1 + ROUNDS) for each in await workload.round(servers, number)]
        await workload.finish(servers)
    return samples


def write_tokenizer(folder: Path) -> None:
    """One token per byte, as the random models have it."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    alphabet = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
