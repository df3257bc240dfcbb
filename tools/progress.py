# SPDX-License-Identifier: Apache-2.0
"""Messages for the user at the terminal."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_INTERVAL_S = 5.0


def say(message: str) -> None:
    """Prints one line to standard error; standard output is for data."""
    print(f"tessera: {message}", file=sys.stderr, flush=True)


def first_line(error: BaseException) -> str:
    """The first line of an error's message; its type if the message is empty."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


@contextmanager
def progress(what: str) -> Iterator[None]:
    """Reports ``what`` every few seconds; in a thread, since engine starts block event loops."""
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
