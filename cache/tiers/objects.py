# SPDX-License-Identifier: Apache-2.0
"""Object stores (S3, Google Cloud Storage, Azure), by way of obstore."""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Final
from urllib.parse import SplitResult, urlsplit

import obstore
from obstore.exceptions import BaseError, NotFoundError
from obstore.store import from_url

from cache.tiers.directory import QUARANTINE, SUFFIX, address_of
from cache.tiers.tier import TIMEOUT_S, Address, Buffer, Stored, TierConfigError, TierError
from machine.http_client import is_loopback

_ENDPOINTS: Final = (
    *("endpoint", "endpoint_url", "aws_endpoint", "aws_endpoint_url", "aws_endpoint_url_s3"),
    *("azure_endpoint", "azure_storage_endpoint"),
)
"""Names of the store's address in options and environment, in lower case; options come first."""
_LISTED_S: Final = 60.0
"""Validity of a listing; others may write to the same place."""


class ObjectTier:
    """A :class:`cache.tiers.tier.StorageTier`. Evicts the oldest files that were not read here since.

    ``options`` are obstore's, in addition to its environment variables (``AWS_ACCESS_KEY_ID`` …). Where several servers
    write to one place, it may exceed ``max_bytes`` while a listing is valid.
    """

    def __init__(self, url: SplitResult, max_bytes: int, options: Mapping[str, str]) -> None:
        """Raises :class:`TierConfigError` if the store can't be listed."""
        self.name, self.timeout_s = url.scheme, TIMEOUT_S
        self.max_bytes = max_bytes
        self._files: dict[Address, Stored] = {}
        self._listed_at = 0.0
        self._read_at: dict[Address, float] = {}
        given = {name: value for name, value in options.items() if name != "allow_http"}
        retries = {"max_retries": 2, "retry_timeout": timedelta(seconds=10)}
        try:
            make: Any = from_url  # its options depend on the scheme
            with _told():
                self._store = make(
                    url._replace(query="").geturl(), retry_config=retries, client_options=_client(options), **given
                )
            self._list_again()
        except (TierError, FileNotFoundError, ValueError, TypeError) as error:
            raise TierConfigError(_first_line(error)) from error

    def put(self, address: Address, file: Buffer) -> None:
        if len(file) > self.max_bytes:
            raise TierError(f"{len(file)} bytes exceed the limit of {self.max_bytes}")
        if self.stat(address) is not None:
            return
        if time.monotonic() - self._listed_at > _LISTED_S:
            self._list_again()
        while self.num_bytes + len(file) > self.max_bytes:
            self.delete([min(self._files.values(), key=self._used_at).address])
        with _told():
            obstore.put(self._store, _path(address), bytes(file), use_multipart=False)
        self._files[address] = Stored(address, len(file), time.time())

    def get(self, address: Address, max_bytes: int) -> Buffer | None:
        try:
            with _told():
                found = obstore.get(self._store, _path(address))
                data = memoryview(found.bytes()) if found.meta["size"] <= max_bytes else memoryview(b"")
        except FileNotFoundError:
            return None
        self._read_at[address] = time.time()
        return data

    def stat(self, address: Address) -> Stored | None:
        try:
            with _told():
                found = obstore.head(self._store, _path(address))
        except FileNotFoundError:
            return None
        return Stored(address, found["size"], found["last_modified"].timestamp())

    def delete(self, addresses: Sequence[Address]) -> None:
        try:
            with _told():
                obstore.delete(self._store, [_path(address) for address in addresses])
        except FileNotFoundError:  # in some stores, the first one that is absent ends the call
            for address in addresses:
                with suppress(FileNotFoundError), _told():
                    obstore.delete(self._store, _path(address))
        for address in addresses:
            self._files.pop(address, None)
            self._read_at.pop(address, None)

    def quarantine(self, address: Address) -> None:
        path = _path(address)
        with suppress(FileNotFoundError), _told():
            obstore.rename(self._store, path, f"{QUARANTINE}/{path.rpartition('/')[2]}")
        self._files.pop(address, None)

    def list(self) -> Iterator[Stored]:
        with _told():
            for found in (each for page in obstore.list(self._store) for each in page):
                folder, _, name = found["path"].rpartition("/")
                if not folder.endswith(QUARANTINE) and (address := address_of(name)) is not None:
                    yield Stored(address, found["size"], found["last_modified"].timestamp())

    def close(self) -> None:
        """Does nothing: no connection is open between calls."""

    def _list_again(self) -> None:
        self._files = {stored.address: stored for stored in self.list()}
        self._listed_at = time.monotonic()

    @property
    def num_bytes(self) -> int:
        """Files of the last listing, with this process's changes since."""
        return sum(stored.num_bytes for stored in self._files.values())

    def _used_at(self, stored: Stored) -> float:
        return max(stored.used_at, self._read_at.get(stored.address, 0.0))


@contextmanager
def _told() -> Iterator[None]:
    """Turns the store's errors into :class:`TierError`, or ``FileNotFoundError`` for missing objects."""
    try:
        yield
    except (NotFoundError, FileNotFoundError) as error:
        raise FileNotFoundError(_first_line(error)) from error
    except BaseException as error:
        # A panic of the store's Rust code is no Exception, and its class can't be imported.
        if isinstance(error, BaseError) or type(error).__name__ == "PanicException":
            raise TierError(_first_line(error)) from error
        raise


def _path(address: Address) -> str:
    return f"{address.key[:2]}/{address.name}{SUFFIX}"


def _client(options: Mapping[str, str]) -> dict[str, Any]:
    """Options of the store's HTTP client: plain http where the endpoint says so, and this machine without a proxy."""
    variables = {name: value for name, value in os.environ.items() if name.startswith(("AWS_", "AZURE_"))}
    named = {name.lower(): value for name, value in {**variables, **options}.items()}
    endpoint = next((named[name] for name in _ENDPOINTS if named.get(name)), "")
    client: dict[str, Any] = {"allow_http": True}
    if is_loopback(endpoint):
        # The client takes proxies from the environment unless it is given one; this one is never asked.
        client |= {"proxy_url": endpoint, "proxy_excludes": urlsplit(endpoint).hostname}
    return client


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:300]
