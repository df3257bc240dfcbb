# SPDX-License-Identifier: Apache-2.0
"""Files in directories that others may write to: locks, and what nobody else should read."""

import fcntl
import logging
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

logger = logging.getLogger(__name__)

TOLD_AFTER_S: Final = 5.0
LONGEST_WAIT_S: Final = 300.0
"""The first look at a large directory takes minutes, and holds the lock."""
_PAUSES_S: Final = (0.001, 0.05)


def mode_of_files(folder: Path) -> int:
    """Permissions of files in a folder: its owner's alone, or those of its group if that may write to the folder."""
    return 0o660 if folder.stat().st_mode & stat.S_IWGRP else 0o600


@contextmanager
def locked_file(path: Path) -> Iterator[int]:
    """Hold the lock on a file, made if there is none; yield its descriptor.

    Raises ``OSError``: if another holds it for minutes, and for a link or anything but a file, which isn't written to.
    """
    mode = mode_of_files(path.parent)
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
            raise OSError(f"{path} is a link, or no file")
        if found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) != mode:
            os.fchmod(file, mode)  # who may open it may lock it
        _lock(file, path)
        yield file
    finally:
        os.close(file)


def _lock(file: int, path: Path) -> None:
    began, pause, is_told = time.monotonic(), _PAUSES_S[0], False
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            waited = time.monotonic() - began
            if waited > LONGEST_WAIT_S:
                raise TimeoutError(f"another process has locked {path} for {waited:.0f} s") from error
            if waited > TOLD_AFTER_S and not is_told:
                logger.warning("waiting for %s, which another process has locked (lsof %s tells which)", path, path)
                is_told = True
            time.sleep(pause)
            pause = min(2 * pause, _PAUSES_S[1])
