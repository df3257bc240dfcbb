# SPDX-License-Identifier: Apache-2.0
"""Long training runs: Ctrl-C between two steps, and checkpoints that a crash leaves whole."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch


@contextmanager
def interruption() -> Iterator[Callable[[], bool]]:
    """Yields a function that tells whether Ctrl-C was pressed within the block."""
    pressed: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, previous)


def save_state(state: dict[str, Any], path: Path) -> None:
    """Writes a checkpoint atomically: a crash keeps the previous one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".new")
    torch.save(state, temporary)
    temporary.replace(path)
