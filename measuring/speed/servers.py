# SPDX-License-Identifier: Apache-2.0
"""The servers of a run, started when a workload first needs them."""

from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Self

from measuring.speed.systems import Server, running
from tools.progress import say

STOCK, TESSERA = "stock", "tessera"
"""Stock vLLM has the first name. Servers of all others are Tessera's."""


class Servers:
    """Servers of one model with the same flags, by name; an asynchronous context manager that stops them all."""

    def __init__(self, model: str, flags: Sequence[str], folder: Path) -> None:
        self._model = model
        self._flags = tuple(flags)
        self._folder = folder
        self._running: dict[str, tuple[Server, AsyncExitStack]] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        async with AsyncExitStack() as every:
            for _server, stack in self._running.values():
                every.push_async_exit(stack)
            self._running.clear()

    async def get(self, name: str, *extra: str) -> Server:
        """The server of this name, with ``extra`` flags if it has to be started; raises :class:`BenchmarkError`."""
        if name not in self._running:
            say(f"starting {name} …")
            stack = AsyncExitStack()
            starting = running(name, self._model, (*self._flags, *extra), self._folder, is_stock=name == STOCK)
            self._running[name] = (await stack.enter_async_context(starting), stack)
        return self._running[name][0]

    async def close(self, name: str) -> None:
        """Stops the server of this name, if it runs."""
        if name in self._running:
            _, stack = self._running.pop(name)
            await stack.aclose()
