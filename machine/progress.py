# SPDX-License-Identifier: Apache-2.0
"""Messages for the user at the terminal."""

import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_INTERVAL_S = 5.0
_MAX_INTERVAL_S: Final = 60.0
_LIVE_INTERVAL_S: Final = 0.5
_CLEAR: Final = "\x1b[2K"
"""Clears the line of a terminal."""


def say(message: str) -> None:
    """Prints a message to standard error; standard output is for data."""
    lines = "\n".join(map(printable, message.split("\n")))
    show(f"tessera: {lines}")


def show(line: str) -> None:
    """Prints another process's line to standard error."""
    print(f"{_CLEAR if sys.stderr.isatty() else ''}{line}", file=sys.stderr, flush=True)


def printable(text: str) -> str:
    """A name or a reason on one line of a terminal, which its characters don't steer."""
    # A byte that is no text is a surrogate from \udc80 on.
    return "".join(each if each.isprintable() else repr(each)[1:-1].replace("\\udc", "\\x") for each in text)


def first_line(error: BaseException) -> str:
    """The first line of an error's message; its type if the message is empty."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


class Progress:
    """Stages of one work and their times: a live line at a terminal, otherwise a line now and then."""

    def __init__(self, stage: str) -> None:
        self._lock = threading.Lock()
        self._is_live = sys.stderr.isatty()
        self._start(stage)

    def begin(self, stage: str) -> None:
        """Ends the present stage and begins another."""
        with self._lock:
            self.end()
            self._start(stage)

    def rename(self, stage: str) -> None:
        """Says more exactly what the present stage does."""
        with self._lock:
            self._stage = stage

    def end(self) -> None:
        """Tells how long the present stage took."""
        say(f"{self._stage}: {time.monotonic() - self._started:.1f} s")

    def report(self, done: threading.Event) -> None:
        """Tells the present stage's time until ``done``."""
        pause = _LIVE_INTERVAL_S if self._is_live else _INTERVAL_S
        while not done.wait(pause):
            with self._lock:
                self._tell(f" {time.monotonic() - self._started:.0f} s")
            if not self._is_live:
                pause = min(2 * pause, _MAX_INTERVAL_S)

    def _start(self, stage: str) -> None:
        self._stage, self._started = stage, time.monotonic()
        self._tell("")

    def _tell(self, took: str) -> None:
        words = f"{self._stage} …{took}"
        if self._is_live:
            width = shutil.get_terminal_size().columns - 1
            # The cursor goes back to the line's begin, where other processes' lines then replace this one.
            print(f"{_CLEAR}{f'tessera: {words}'[:width]}\r", end="", file=sys.stderr, flush=True)
        else:
            say(words)


@contextmanager
def progress(stage: str) -> Iterator[Progress]:
    """Reports the block's stages, the first of them ``stage``; in a thread, since engine starts block event loops."""
    done = threading.Event()
    shown = Progress(stage)
    thread = threading.Thread(target=shown.report, args=(done,), name="progress", daemon=True)
    thread.start()
    try:
        yield shown
        shown.end()
    finally:
        done.set()
        thread.join()
