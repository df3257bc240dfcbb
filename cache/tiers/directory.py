# SPDX-License-Identifier: Apache-2.0
"""A directory: a local SSD, or a file system that several servers share (NFS).

Files are ``ab/abcd….0-of-2.safetensors`` below the root; other files there are neither read nor deleted. Writers and
deleters hold a lock on the file ``lock``, which has the number of bytes in the directory; every start corrects it.
Readers take no lock: files appear whole, by renaming, and an opened file stays readable. Servers that share a directory
need no other coordination.

Whoever writes to the directory may put links in it. The root alone is found by its path; everything else is named in an
opened folder, which is no link.
"""

import os
import re
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Final

from cache.tiers.kept import KeptMemory
from cache.tiers.locked_file import locked_file, mode_of_files
from cache.tiers.tier import TIMEOUT_S, Address, Buffer, Stored, TierConfigError, TierError

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
    timeout_s = TIMEOUT_S

    def __init__(self, root: Path, max_bytes: int, allocate: Callable[[int], memoryview] | None = None) -> None:
        """Raises :class:`TierConfigError` if the directory can't be made or written to."""
        self.max_bytes = max_bytes
        self._memory = KeptMemory(allocate)
        self.root = root
        self.num_bytes = 0
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._locked() as lock:
                for folder, name, _ in self._regular_files(_LEFTOVER):
                    self._unlink(folder, name)  # its writer held the lock, and has ended
                self._shrink(lock, max_bytes)
        except OSError as error:
            raise TierConfigError(f"{root}: {error.strerror or error}") from error

    def put(self, address: Address, file: Buffer) -> None:
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
                self._write_whole(self.path(address), file)
            except BaseException:
                self._note(lock, used)
                raise

    def get(self, address: Address, max_bytes: int) -> Buffer | None:
        try:
            file = self.open(address)
        except FileNotFoundError:
            return None
        with file:
            found = os.fstat(file.fileno())
            data, read = self._memory.take(min(found.st_size, max_bytes)), 0
            while (count := file.readinto(data[read:])) not in (0, None):
                read += count
            if found.st_nlink == 1:  # else the time is another file's, too
                with suppress(OSError):  # a read-only directory can still serve
                    os.utime(file.fileno())
        return data[:read]

    def open(self, address: Address) -> FileIO:
        """Opens a file for reading, which is not a use of it; raises ``FileNotFoundError`` if it is absent."""
        path = self.path(address)
        with self._folder(path.parent.name) as folder:
            file = os.open(path.name, _READING, dir_fd=folder)
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise TierError(f"{path} is no file")
        return os.fdopen(file, "rb", buffering=0)

    def stat(self, address: Address) -> Stored | None:
        path = self.path(address)
        try:
            with self._folder(path.parent.name) as folder:
                found = os.lstat(path.name, dir_fd=folder)
        except FileNotFoundError:
            return None
        return Stored(address, found.st_size, found.st_mtime) if stat.S_ISREG(found.st_mode) else None

    def delete(self, addresses: Sequence[Address]) -> None:
        with self._locked() as lock:
            for address in addresses:
                self._remove(lock, address)

    def quarantine(self, address: Address) -> None:
        """Moves a file to ``quarantine``, where it still counts and is evicted first."""
        path = self.path(address)
        with (
            self._locked(),
            suppress(FileNotFoundError),
            self._folder(path.parent.name) as source,
            self._folder(QUARANTINE, make=True) as target,
        ):
            os.rename(path.name, path.name, src_dir_fd=source, dst_dir_fd=target)

    def list(self) -> Iterator[Stored]:
        for folder, name, found in self._files():
            if folder != QUARANTINE and (address := address_of(name)) is not None:
                yield Stored(address, found.st_size, found.st_mtime)

    def close(self) -> None:
        """Does nothing: no file is open between calls."""

    def path(self, address: Address) -> Path:
        """Path of an address's file."""
        return self.root / address.key[:2] / f"{address.name}{SUFFIX}"

    def empty_quarantine(self) -> None:
        """Drops quarantined files."""
        with self._locked() as lock:
            for folder, name, _ in self._files():
                if folder == QUARANTINE:
                    self._unlink(folder, name)
            self._shrink(lock, self.max_bytes)

    def shrink(self, max_bytes: int) -> int:
        """Drops the least recently used files until at most ``max_bytes`` are left; returns the bytes left."""
        with self._locked() as lock:
            return self._shrink(lock, max_bytes)

    def _shrink(self, lock: int, max_bytes: int) -> int:
        files = sorted(self._files(), key=lambda file: (file[0] != QUARANTINE, file[2].st_mtime))
        used = sum(found.st_size for _, _, found in files)
        for folder, name, found in files:
            if used <= max_bytes:
                break
            self._unlink(folder, name)
            used -= found.st_size
        self._note(lock, used)
        return used

    def _files(self) -> Iterator[tuple[str, str, os.stat_result]]:
        """All files that count, including quarantined ones."""
        for folder, name, found in self._regular_files(_NAME):
            address = address_of(name)
            if folder == QUARANTINE or (address is not None and self.root / folder / name == self.path(address)):
                yield folder, name, found

    def _regular_files(self, names: re.Pattern[str]) -> Iterator[tuple[str, str, os.stat_result]]:
        """Folders, names and metadata of regular files; passes over folders that have gone or are not readable."""
        for path in self.root.iterdir():
            with suppress(TierError, FileNotFoundError, PermissionError), self._folder(path.name) as folder:
                for entry in list(os.scandir(folder)):
                    if names.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                        with suppress(FileNotFoundError):
                            yield path.name, entry.name, entry.stat(follow_symlinks=False)

    def _note(self, lock: int, number: int) -> None:
        """Writes the number of bytes for the next holder of the lock."""
        os.pwrite(lock, f"{number:<31}\n".encode(), 0)
        self.num_bytes = number

    def _remove(self, lock: int, address: Address) -> None:
        if (stored := self.stat(address)) is not None:
            self._unlink(address.key[:2], self.path(address).name)
            self._note(lock, max(0, (_read_number(lock) or 0) - stored.num_bytes))

    def _unlink(self, folder_name: str, name: str) -> None:
        with suppress(FileNotFoundError), self._folder(folder_name) as folder:
            os.unlink(name, dir_fd=folder)

    def _write_whole(self, path: Path, file: Buffer) -> None:
        """Writes under a temporary name; the final name appears once the data is on the disk."""
        temporary = path.with_suffix(f".{os.getpid()}-{time.monotonic_ns()}{_TEMPORARY}").name
        with self._folder(path.parent.name, make=True) as folder:
            try:
                made = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder)
                with os.fdopen(made, "wb", buffering=0) as target:
                    os.fchmod(made, mode_of_files(self.root))  # KV and ids' texts are their owner's
                    view, written = memoryview(file).cast("B"), 0
                    while written < len(view):
                        written += target.write(view[written:]) or 0
                    os.fsync(made)
                os.rename(temporary, path.name, src_dir_fd=folder, dst_dir_fd=folder)
                os.fsync(folder)
            except BaseException:
                with suppress(FileNotFoundError):
                    os.unlink(temporary, dir_fd=folder)
                raise

    @contextmanager
    def _folder(self, name: str, *, make: bool = False) -> Iterator[int]:
        """A descriptor of a folder of the root. Raises :class:`TierError` for a link and all else that is no folder."""
        path = self.root / name
        if make:
            with suppress(FileExistsError):
                path.mkdir()
        try:
            folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except NotADirectoryError as error:
            raise TierError(f"{path} is a link, or no folder") from error
        try:
            yield folder
        finally:
            os.close(folder)

    def _locked(self) -> AbstractContextManager[int]:
        return locked_file(self.root / "lock")


def address_of(name: str) -> Address | None:
    """The address of a file's name; ``None`` for other names."""
    if (match := _NAME.fullmatch(name)) is None:
        return None
    return Address(match[1], int(match[2]), int(match[3]))


def _read_number(lock: int) -> int | None:
    text = os.pread(lock, 32, 0).strip()
    return int(text) if text.isdigit() else None
