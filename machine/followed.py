# SPDX-License-Identifier: Apache-2.0
"""Lines of a file while another process writes it."""

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final

from machine.progress import show

_POLL_S: Final = 0.2
_ONGOING: Final = re.compile(r"tessera: .+ …( \d+ s)?$")


@contextmanager
def followed(file: Path, take: Callable[[str], None]) -> Iterator[None]:
    """Gives ``take`` each whole line of the file, in a thread, while the block runs."""
    done = threading.Event()
    thread = threading.Thread(target=_follow, args=(file, take, done), name="followed", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@contextmanager
def echoed(log: Path, name: str = "") -> Iterator[None]:
    """Repeats a command's output on standard error, but for its stages under way.

    ``log`` is where the command writes it; ``name`` is put before each line.
    """
    with followed(log, lambda line: None if _ONGOING.match(line) else show(f"{name}{line}")):
        yield


def _follow(file: Path, take: Callable[[str], None], done: threading.Event) -> None:
    with file.open("rb") as lines:
        rest = b""
        while not done.wait(_POLL_S):
            rest = _take(lines, rest, take)
        _take(lines, rest, take)


def _take(lines: BinaryIO, rest: bytes, take: Callable[[str], None]) -> bytes:
    *whole, rest = (rest + lines.read()).split(b"\n")
    for line in whole:
        take(line.decode(errors="replace"))
    return rest
