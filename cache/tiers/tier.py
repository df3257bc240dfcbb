# SPDX-License-Identifier: Apache-2.0
"""The interface of tiers: files by content address, within a size."""

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple, Protocol

Buffer = bytes | bytearray | memoryview
TIMEOUT_S: Final = 1.0
"""Time that a load may take before its chunk is computed instead, unless a tier's URL says otherwise."""


class TierError(Exception):
    """A call of a tier failed; the message says why."""


class TierConfigError(ValueError):
    """A tier's configuration is invalid; the message says why, in one line."""


class Address(NamedTuple):
    """One part of a segment's KV: key in hexadecimal, number of the part, and how many parts there are."""

    key: str
    part: int
    parts: int

    @property
    def name(self) -> str:
        """The name of the file, in every tier."""
        return f"{self.key}.{self.part}-of-{self.parts}"


class Stored(NamedTuple):
    """One file in a tier. ``used_at`` is in seconds since the epoch."""

    address: Address
    num_bytes: int
    used_at: float


class StorageTier(Protocol):
    """Keeps files of at most ``max_bytes`` altogether; evicts the least recently used.

    Calls block, and raise :class:`TierError` or ``OSError``. Several threads may get files at once, while another one
    writes.
    """

    name: str
    max_bytes: int
    timeout_s: float
    """Time that a load may take."""

    @property
    def num_bytes(self) -> int:
        """Bytes held, as far as this process knows; asks nobody."""

    def put(self, address: Address, file: Buffer) -> None:
        """Stores a file, whole or not at all; does nothing if it exists."""

    def get(self, address: Address, max_bytes: int) -> Buffer | None:
        """The file, writable if that needs no copy; ``None`` if absent.

        A file longer than ``max_bytes`` is not KV: it is returned truncated, so that its check fails.
        """

    def stat(self, address: Address) -> Stored | None:
        """The file's metadata; ``None`` if absent."""

    def delete(self, addresses: Sequence[Address]) -> None:
        """Drop these files, of which any may be absent."""

    def quarantine(self, address: Address) -> None:
        """Makes a damaged file unfindable, and keeps it for inspection if the tier can."""

    def list(self) -> Iterator[Stored]:
        """Every file, unordered."""

    def close(self) -> None:
        """Closes connections."""
