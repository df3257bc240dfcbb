# SPDX-License-Identifier: Apache-2.0
"""Tenants and their API keys, read from a file::

    [acme]                           # the tenant's name, and the namespace of its chunks
    keys = ["sha256:9f86d081…"]      # made by `tessera key`; two while one replaces the other
    roles = ["chat", "ingest"]
    requests_per_minute = 600

The file is read again after it has changed.
"""

import hashlib
import hmac
import logging
import secrets
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ByteSize, ConfigDict, Field, StringConstraints, ValidationError

from cache.eviction.quotas import Quota
from machine.progress import first_line

logger = logging.getLogger(__name__)

Role = Literal["chat", "ingest", "admin"]
KeyHash = Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$")]
_NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"
_LOOK_AGAIN_S = 1.0


class TenantsFileError(ValueError):
    """The file of tenants is invalid; the message says where and why."""


class Tenant(BaseModel):
    """A namespace with its API keys and limits. A limit that is not given does not apply."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(pattern=_NAME)
    keys: tuple[KeyHash, ...] = Field(min_length=1)
    roles: frozenset[Role] = frozenset({"chat"})
    namespaces: frozenset[str] = frozenset()
    """Further namespaces that its requests may name."""
    requests_per_minute: int | None = Field(None, ge=1)
    tokens_per_minute: int | None = Field(None, ge=1)
    concurrent_requests: int | None = Field(None, ge=1)
    cache_memory: ByteSize | None = Field(None, gt=0)
    """Share of a server's chunk pools, all workers together; likewise ``cache_segments``."""
    cache_segments: int | None = Field(None, ge=1)
    collections_size: ByteSize | None = Field(None, gt=0)
    """Bytes on the disk of the collections in each namespace that it may name."""


def new_key() -> str:
    """A new key with 256 random bits."""
    return f"tsr-{secrets.token_urlsafe(32)}"


def hash_of(key: str) -> str:
    """The hash of a key, for the file. Keys are long and random, so a plain hash is safe."""
    return f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"


def parse_tenants(text: str) -> dict[str, Tenant]:
    """Tenants by name; raises :class:`TenantsFileError`."""
    try:
        sections = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise TenantsFileError(str(error)) from error
    tenants = {name: _tenant(name, section) for name, section in sections.items()}
    if not tenants:
        raise TenantsFileError("it has no tenant")
    owners: dict[str, str] = {}
    for tenant in tenants.values():
        for key in tenant.keys:
            if (other := owners.setdefault(key, tenant.name)) != tenant.name:
                raise TenantsFileError(f"{other} and {tenant.name} have a key in common")
    return tenants


class Tenants:
    """The tenants of a server."""

    def __init__(self, tenants: dict[str, Tenant]) -> None:
        self._tenants = tenants

    def of_key(self, key: str) -> Tenant | None:
        """The tenant of a key, found in constant time."""
        given, found = hash_of(key), None
        for tenant in self.by_name().values():
            for known in tenant.keys:
                if hmac.compare_digest(known, given):
                    found = tenant
        return found

    def by_name(self) -> dict[str, Tenant]:
        """All tenants."""
        return self._tenants

    def quota_of(self, namespace: str, page_bytes: int) -> Quota:
        """The quota of a namespace in a pool with pages of ``page_bytes``."""
        if (tenant := self.by_name().get(namespace)) is None:
            return Quota()
        pages = None if tenant.cache_memory is None else int(tenant.cache_memory) // page_bytes
        return Quota(pages, tenant.cache_segments)


class TenantsFile(Tenants):
    """Tenants of a file, read again after it has changed. An invalid file leaves the tenants unchanged."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._looked_at = clock()
        self._seen = _state(path)
        super().__init__(_read(path))

    def by_name(self) -> dict[str, Tenant]:
        if self._clock() >= self._looked_at + _LOOK_AGAIN_S:
            self._looked_at = self._clock()
            self._read_if_changed()
        return super().by_name()

    def _read_if_changed(self) -> None:
        if (state := _state(self._path)) == self._seen:
            return
        self._seen = state
        try:
            self._tenants = _read(self._path)
        except TenantsFileError as error:
            logger.error("%s; keeping the previous tenants", error)


def _tenant(name: str, section: object) -> Tenant:
    if not isinstance(section, dict):
        raise TenantsFileError(f"{name} is not a section; a tenant begins with a line [name]")
    try:
        return Tenant(**{"name": name, **section})
    except ValidationError as error:
        first = error.errors()[0]
        raise TenantsFileError(f"[{name}] {'.'.join(map(str, first['loc']))}: {first['msg']}") from error


def _read(path: Path) -> dict[str, Tenant]:
    try:
        return parse_tenants(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise TenantsFileError(f"--tenants {path}: {first_line(error)}") from error
    except TenantsFileError as error:
        raise TenantsFileError(f"--tenants {path}: {error}") from error


def _state(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
