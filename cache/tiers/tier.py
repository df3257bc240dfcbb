# SPDX-License-Identifier: Apache-2.0
"""What every tier can do: keep files by content address, within a size."""

from collections.abc import Iterator
from typing import NamedTuple, Protocol

Buffer = bytes | bytearray | memoryview


class TierError(Exception):
    """A tier could not do what it was asked, now; the message says why."""


class TierConfigError(ValueError):
    """A tier can't be made as it is configured; the message says why, in one line."""


class Address(NamedTuple):
    """One worker's file of one segment: the segment's key in hexadecimal, and which worker of how many."""

    key: str
    rank: int
    ranks: int


class Stored(NamedTuple):
    """One file in a tier. ``used_at`` is in seconds since the epoch."""

    address: Address
    num_bytes: int
    used_at: float


class StorageTier(Protocol):
    """Keeps files of at most ``max_bytes`` altogether; what was used least recently makes room.

    Calls block. They raise :class:`TierError` or ``OSError``, and come from one thread at a time.
    """

    name: str
    max_bytes: int

    @property
    def num_bytes(self) -> int:
        """What it holds, as far as this process knows; without asking."""

    def put(self, address: Address, file: Buffer) -> None:
        """Keeps a file, whole or not at all; nothing happens if it is there."""

    def get(self, address: Address, max_bytes: int) -> Buffer | None:
        """The file, writable if it can be had so without a copy; ``None`` if it is not there.

        One that is longer than ``max_bytes`` is nobody's KV: it comes cut off, so that whoever checks it refuses it.
        """

    def stat(self, address: Address) -> Stored | None:
        """What is known of the file, if it is there."""

    def delete(self, address: Address) -> None:
        """Drops a file; nothing happens if it is not there."""

    def quarantine(self, address: Address) -> None:
        """Puts a damaged file where nobody finds it any more, for people to look at if the tier can keep it."""

    def list(self) -> Iterator[Stored]:
        """Every file, in no order."""

    def close(self) -> None:
        """Ends connections."""
