# SPDX-License-Identifier: Apache-2.0
"""A directory: a local SSD, or a file system that several servers share (NFS).

Files are ``ab/abcd….0-of-2.safetensors`` below the root; other files there are neither read nor deleted. Writers and
deleters hold a lock on the file ``lock``, which has the number of bytes in the directory; every start corrects it.
Readers take no lock: files appear whole, by renaming, and an opened file stays readable. Servers that share a directory
need no other coordination.
"""

import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Final

from cache.tiers.kept import KeptMemory
from cache.tiers.locked_file import locked_file, mode_of_files
from cache.tiers.tier import Address, Buffer, Stored, TierConfigError, TierError

SUFFIX: Final = ".safetensors"
QUARANTINE: Final = "quarantine"
_TEMPORARY: Final = ".tmp"
_ROOM: Final = 0.05
"""Share of the size freed at once, since finding the oldest files is slow."""
_STEM: Final = r"([0-9a-f]{2,128})\.([0-9]{1,5})-of-([0-9]{1,5})"
_NAME: Final = re.compile(_STEM + re.escape(SUFFIX))
_LEFTOVER: Final = re.compile(_STEM + r"\.[0-9]+-[0-9]+" + re.escape(_TEMPORARY))

_READING: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
"""Follows no link, and does not block on a pipe."""


class DirectoryTier:
    """A :class:`cache.tiers.tier.StorageTier`. A file's modification time is the time of its last use.

    ``allocate`` gives memory, pinned for instance, for files that are read.
    """

    name = "file"

    def __init__(self, root: Path, max_bytes: int, allocate: Callable[[int], memoryview] | None = None) -> None:
        """Raises :class:`TierConfigError` if the directory can't be made or written to."""
        self.max_bytes = max_bytes
        self._memory = KeptMemory(allocate)
        self.root = root
        self.num_bytes = 0
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._locked() as lock:
                for leftover, _ in _regular_files(root, _LEFTOVER):
                    leftover.unlink(missing_ok=True)  # its writer held the lock, and has ended
                self._shrink(lock, max_bytes)
        except OSError as error:
            raise TierConfigError(f"{root}: {error.strerror or error}") from error

    def put(self, address: Address, file: Buffer) -> None:
        path = self.path(address)
        if len(file) > self.max_bytes:
            raise TierError(f"{len(file)} bytes exceed the limit of {self.max_bytes}")
        if self.stat(address) is not None:
            return
        with self._locked() as lock:
            if self.stat(address) is not None:
                return
            used = _read_number(lock)
            if used is None or used + len(file) > self.max_bytes:
                used = self._shrink(lock, min(self.max_bytes - len(file), int(self.max_bytes * (1 - _ROOM))))
            self._note(lock, used + len(file))
            try:
                _write_whole(path, file)
            except BaseException:
                self._note(lock, used)
                raise

    def get(self, address: Address, max_bytes: int) -> Buffer | None:
        path = self.path(address)
        try:
            with os.fdopen(os.open(path, _READING), "rb", buffering=0) as file:
                found = os.fstat(file.fileno())
                if not stat.S_ISREG(found.st_mode):
                    raise TierError(f"{path} is no file")
                data, read = self._memory.take(min(found.st_size, max_bytes)), 0
                while (count := file.readinto(data[read:])) not in (0, None):
                    read += count
        except FileNotFoundError:
            return None
        with suppress(OSError):  # a read-only directory can still serve
            os.utime(path)
        return data[:read]

    def stat(self, address: Address) -> Stored | None:
        try:
            found = self.path(address).lstat()
        except FileNotFoundError:
            return None
        return Stored(address, found.st_size, found.st_mtime) if stat.S_ISREG(found.st_mode) else None

    def delete(self, address: Address) -> None:
        with self._locked() as lock:
            self._remove(lock, address)

    def quarantine(self, address: Address) -> None:
        """Moves a file to ``quarantine``, where it still counts and is evicted first."""
        with self._locked():
            path = self.path(address)
            target = self.root / QUARANTINE / path.name
            target.parent.mkdir(exist_ok=True)
            with suppress(FileNotFoundError):
                path.rename(target)

    def list(self) -> Iterator[Stored]:
        for path, found in self._files():
            if path.parent.name != QUARANTINE and (address := address_of(path.name)) is not None:
                yield Stored(address, found.st_size, found.st_mtime)

    def close(self) -> None:
        """Does nothing: no file is open between calls."""

    def path(self, address: Address) -> Path:
        """Path of an address's file."""
        return self.root / address.key[:2] / f"{address.key}.{address.rank}-of-{address.ranks}{SUFFIX}"

    def empty_quarantine(self) -> None:
        """Drops quarantined files."""
        with self._locked() as lock:
            for path, _ in self._files():
                if path.parent.name == QUARANTINE:
                    path.unlink(missing_ok=True)
            self._shrink(lock, self.max_bytes)

    def shrink(self, max_bytes: int) -> int:
        """Drops the least recently used files until at most ``max_bytes`` are left; returns the bytes left."""
        with self._locked() as lock:
            return self._shrink(lock, max_bytes)

    def _shrink(self, lock: int, max_bytes: int) -> int:
        files = sorted(self._files(), key=lambda file: (file[0].parent.name != QUARANTINE, file[1].st_mtime))
        used = sum(found.st_size for _, found in files)
        for path, found in files:
            if used <= max_bytes:
                break
            path.unlink(missing_ok=True)
            used -= found.st_size
        self._note(lock, used)
        return used

    def _files(self) -> Iterator[tuple[Path, os.stat_result]]:
        """All files that count, including quarantined ones."""
        for path, found in _regular_files(self.root, _NAME):
            address = address_of(path.name)
            if path.parent.name == QUARANTINE or (address is not None and path == self.path(address)):
                yield path, found

    def _note(self, lock: int, number: int) -> None:
        """Writes the number of bytes for the next holder of the lock."""
        os.pwrite(lock, f"{number:<31}\n".encode(), 0)
        self.num_bytes = number

    def _remove(self, lock: int, address: Address) -> None:
        if (stored := self.stat(address)) is not None:
            self.path(address).unlink(missing_ok=True)
            self._note(lock, max(0, (_read_number(lock) or 0) - stored.num_bytes))

    def _locked(self) -> AbstractContextManager[int]:
        return locked_file(self.root / "lock")


def address_of(name: str) -> Address | None:
    """The address of a file's name; ``None`` for other names."""
    if (match := _NAME.fullmatch(name)) is None:
        return None
    return Address(match[1], int(match[2]), int(match[3]))


def _regular_files(root: Path, name: re.Pattern[str]) -> Iterator[tuple[Path, os.stat_result]]:
    """Regular files with addresses in the folders of ``root``."""
    for folder in root.iterdir():
        for path in _entries(folder):
            if name.fullmatch(path.name):
                with suppress(FileNotFoundError):
                    if stat.S_ISREG((found := path.lstat()).st_mode):
                        yield path, found


def _entries(folder: Path) -> list[Path]:
    """Entries of a folder; none if it is a link, has gone or is not readable."""
    try:
        return list(folder.iterdir()) if folder.is_dir() and not folder.is_symlink() else []
    except (FileNotFoundError, PermissionError):
        return []


def _write_whole(path: Path, file: Buffer) -> None:
    """Writes under a temporary name; the final name appears once the data is on the disk."""
    path.parent.mkdir(exist_ok=True)
    if path.parent.is_symlink():
        raise TierError(f"{path.parent} is a link")
    temporary = path.with_suffix(f".{os.getpid()}-{time.monotonic_ns()}{_TEMPORARY}")
    try:
        with temporary.open("xb", buffering=0) as target:
            os.fchmod(target.fileno(), mode_of_files(path.parent.parent))  # KV and ids' texts are their owner's
            view, written = memoryview(file).cast("B"), 0
            while written < len(view):
                written += target.write(view[written:]) or 0
            os.fsync(target.fileno())
        temporary.rename(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _read_number(lock: int) -> int | None:
    text = os.pread(lock, 32, 0).strip()
    return int(text) if text.isdigit() else None
