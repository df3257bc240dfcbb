# SPDX-License-Identifier: Apache-2.0
"""Tiers that others may write to: only files with a signature of the servers' common key are read.

A signature, HMAC-SHA256, is of a file at its address, so that none can stand in for another, and follows the file.
Nothing is encrypted, and an earlier file of the same address has a right signature, too.
"""

import hashlib
import hmac
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, Self

from cache.tiers.tier import Address, Buffer, StorageTier, Stored, TierConfigError, TierError

LEAST_SECRET: Final = 16
"""Bytes of a secret at least."""
_PURPOSE: Final = b"tessera: files of tiers, 1"
_MARK: Final = b"tsrhmac1"
_MAC_BYTES: Final = hashlib.sha256().digest_size
SIGNATURE_BYTES: Final = len(_MARK) + _MAC_BYTES


class UnsignedFileError(TierError):
    """A file that nobody with the key has written to this address. Don't use any of it."""


class TierKey:
    """The key of a tier's servers, derived from a secret, of which it tells nothing."""

    def __init__(self, key: bytes) -> None:
        self.key = key

    @classmethod
    def of(cls, secret: bytes) -> Self:
        """Derive the key from a secret."""
        return cls(hmac.digest(secret, _PURPOSE, "sha256"))

    @classmethod
    def read(cls, path: Path) -> Self:
        """Derive the key from a file's secret; raise :class:`TierConfigError`, which doesn't quote ``path``.

        Somebody may have given the secret itself.
        """
        try:
            secret = path.read_bytes().strip()
        except OSError as error:
            raise TierConfigError(f"--tier-key: the file can't be read: {error.strerror}") from error
        if len(secret) < LEAST_SECRET:
            raise TierConfigError(f"--tier-key: the file has less than {LEAST_SECRET} bytes")
        return cls.of(secret)

    def signed(self, address: Address, file: Buffer) -> bytes:
        """Return a file with its signature behind it."""
        return b"".join((file, _MARK, self._mac(address, file)))

    def checked(self, address: Address, signed: Buffer) -> memoryview:
        """Return a view of a file without its signature; raise :class:`UnsignedFileError`."""
        view = memoryview(signed)
        if not is_signed(view):
            raise UnsignedFileError("it isn't signed")
        file, mac = view[:-SIGNATURE_BYTES], bytes(view[-_MAC_BYTES:])
        if not hmac.compare_digest(mac, self._mac(address, file)):
            raise UnsignedFileError("it is signed with another key, or for another address, or was changed since")
        return file

    def _mac(self, address: Address, file: Buffer) -> bytes:
        made = hmac.new(self.key, f"{address.name}\n".encode(), "sha256")
        made.update(file)
        return made.digest()


def is_signed(file: Buffer) -> bool:
    """Whether a signature, right or wrong, follows a file."""
    return bytes(memoryview(file)[-SIGNATURE_BYTES:-_MAC_BYTES]) == _MARK


class SignedTier:
    """A :class:`cache.tiers.tier.StorageTier` that signs what it puts into another, and gets signed files only."""

    def __init__(self, tier: StorageTier, key: TierKey) -> None:
        self.name, self.max_bytes, self.timeout_s = tier.name, tier.max_bytes, tier.timeout_s
        self._tier = tier
        self._key = key

    @property
    def num_bytes(self) -> int:
        return self._tier.num_bytes

    def put(self, address: Address, file: Buffer) -> None:
        self._tier.put(address, self._key.signed(address, file))

    def get(self, address: Address, max_bytes: int) -> Buffer | None:
        """Raises :class:`UnsignedFileError`, also for a file that is too long."""
        signed = self._tier.get(address, max_bytes + SIGNATURE_BYTES)
        return None if signed is None else self._key.checked(address, signed)

    def stat(self, address: Address) -> Stored | None:
        return self._tier.stat(address)

    def delete(self, addresses: Sequence[Address]) -> None:
        self._tier.delete(addresses)

    def quarantine(self, address: Address) -> None:
        self._tier.quarantine(address)

    def list(self) -> Iterator[Stored]:
        return self._tier.list()

    def close(self) -> None:
        self._tier.close()
