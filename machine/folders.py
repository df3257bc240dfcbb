# SPDX-License-Identifier: Apache-2.0
"""Tessera's home folder, and folders that are written atomically."""

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_NETWORK: Final = ("nfs", "cifs", "smb", "9p", "ceph", "lustre", "gpfs", "beegfs", "afs", "virtiofs", "fuse")
"""Beginnings of the types of file systems that several machines may have mounted."""


def tessera_home() -> Path:
    """Folder for built models and logs: ``TESSERA_HOME``, by default in the user's cache folder."""
    home = os.environ.get("TESSERA_HOME")
    return Path(home) if home else Path.home() / ".cache" / "tessera"


def is_on_network(folder: Path) -> bool:
    """Whether other machines may have the file system of ``folder`` mounted; ``False`` where Linux doesn't say."""
    device = folder.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    types = [line.partition(" - ")[2].split()[0] for line in mounts if line.split()[2] == wanted]
    return any(kind.startswith(_NETWORK) for kind in types)


def check_replaceable(path: Path, mark: str) -> None:
    """Raises `FileExistsError` unless ``path`` is absent, empty, or has the file ``mark``."""
    if path.exists() and not (path / mark).is_file() and (not path.is_dir() or any(path.iterdir())):
        raise FileExistsError(f"{path} is in use: it has no {mark}; choose another folder")


@contextmanager
def replaced_folder(path: Path, mark: str) -> Iterator[Path]:
    """Yields an empty folder that replaces ``path`` atomically at the end; an error leaves ``path`` unchanged.

    Raises `FileExistsError` as `check_replaceable` does, and `OSError` if another process was faster.
    """
    check_replaceable(path, mark)
    path.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{path.name}.building-"
    for left_over in path.parent.glob(prefix + "*"):  # of killed processes
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
    """Sets the modes that plain ``mkdir`` and ``open`` would give."""
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
