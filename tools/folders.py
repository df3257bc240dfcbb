# SPDX-License-Identifier: Apache-2.0
"""Folders that Tessera keeps things in, and folders that it writes as a whole."""

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def tessera_home() -> Path:
    """The folder for models that Tessera builds and for logs: ``TESSERA_HOME``, or one in the user's cache folder."""
    home = os.environ.get("TESSERA_HOME")
    return Path(home) if home else Path.home() / ".cache" / "tessera"


def check_replaceable(path: Path, mark: str) -> None:
    """Raises `FileExistsError` if ``path`` holds anything but a folder of ours, which has the file ``mark``."""
    if path.exists() and not (path / mark).is_file() and (not path.is_dir() or any(path.iterdir())):
        raise FileExistsError(f"{path} holds something other than what belongs there ({mark}); name another folder")


@contextmanager
def replaced_folder(path: Path, mark: str) -> Iterator[Path]:
    """An empty folder that takes the place of ``path`` at the end, all at once; after an error ``path`` is as before.

    Raises `FileExistsError` as `check_replaceable` does, and `OSError` if another process was faster.
    """
    check_replaceable(path, mark)
    path.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{path.name}.building-"
    for left_over in path.parent.glob(prefix + "*"):  # from a process that was killed long ago
        if time.time() - left_over.stat().st_mtime > 3600:
            shutil.rmtree(left_over, ignore_errors=True)
    staging = Path(tempfile.mkdtemp(prefix=prefix, dir=path.parent))
    try:
        yield staging
        _open_to_all(staging)
        _swap(staging, path)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _open_to_all(folder: Path) -> None:
    """Modes as a plain ``mkdir`` and ``open`` give them, whatever made the files."""
    folder.chmod(0o755)
    for file in folder.iterdir():
        file.chmod(0o644)


def _swap(staging: Path, path: Path) -> None:
    old = staging.with_name(staging.name + "-old")
    try:
        if path.exists():
            path.rename(old)
        staging.rename(path)
    finally:
        shutil.rmtree(old, ignore_errors=True)
