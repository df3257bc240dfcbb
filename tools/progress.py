# SPDX-License-Identifier: Apache-2.0
"""Words for the person at the terminal."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_INTERVAL_S = 5.0


def say(message: str) -> None:
    """One line on standard error; standard output stays free for data."""
    print(f"tessera: {message}", file=sys.stderr, flush=True)


def first_line(error: BaseException) -> str:
    """What an error says, in one line; its type if it says nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


@contextmanager
def progress(what: str) -> Iterator[None]:
    """Says every few seconds that ``what`` still goes on. A thread, since starting an engine blocks the event loop."""
    done = threading.Event()
    started = time.monotonic()

    def report() -> None:
        while not done.wait(_INTERVAL_S):
            say(f"{what} … {time.monotonic() - started:.0f} s")

    say(f"{what} …")
    thread = threading.Thread(target=report, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
