# SPDX-License-Identifier: Apache-2.0
"""An event loop whose clock jumps to whatever is awaited next."""

import asyncio
import selectors
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest


class _Skipping(selectors.SelectSelector):
    """Advances the clock instead of waiting."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        self.now += timeout or 0
        return super().select(0)


class _VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in which only sleeping takes time, exactly as requested."""

    def __init__(self) -> None:
        self.clock = _Skipping()
        super().__init__(self.clock)

    def time(self) -> float:
        return self.clock.now


@contextmanager
def virtual_time(monkeypatch: pytest.MonkeyPatch, *modules: str) -> Iterator[Callable[[Coroutine[Any, Any, Any]], Any]]:
    """Yields a function that runs a coroutine in virtual time, which is also `time.monotonic` in the modules."""
    with asyncio.Runner(loop_factory=_VirtualLoop) as runner:
        for module in modules:
            monkeypatch.setattr(f"{module}.time", SimpleNamespace(monotonic=runner.get_loop().time))
        yield runner.run
