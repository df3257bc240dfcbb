# SPDX-License-Identifier: Apache-2.0
"""Exposure of a server: to clients with a key, to this machine, or to everybody."""

import ipaddress
import socket
from collections.abc import Iterable, Sequence
from pathlib import Path

from app.access.middleware import BrowserCheck
from app.access.tenants import Tenant, Tenants, TenantsFile, hash_of

LOOPBACK = "127.0.0.1"


class ExposedError(ValueError):
    """The server would be open to too many; the message says how to restrict it."""


def known_tenants(file: str | None, api_keys: Sequence[str] = ()) -> Tenants | None:
    """The tenants of ``--tenants``, or one tenant for vLLM's ``--api-key``; ``None`` without keys.

    Raises :class:`ExposedError` if both are given, :class:`~app.access.tenants.TenantsFileError` for an invalid file.
    """
    if file is not None and api_keys:
        raise ExposedError("--api-key and --tenants: give keys in one place")
    if file is not None:
        return TenantsFile(Path(file))
    if not api_keys:
        return None
    keys = tuple(hash_of(key) for key in api_keys)
    everything = frozenset({"chat", "ingest", "admin"})
    return Tenants({"default": Tenant(name="default", keys=keys, roles=everything, namespaces=frozenset({"*"}))})


def checked_host(host: str | None, tenants: Tenants | None, *, allow_anonymous: bool) -> str:
    """The address to listen on, loopback by default; raises :class:`ExposedError` for an exposed one."""
    host = host or LOOPBACK
    if tenants is None and not allow_anonymous and not _is_loopback(host):
        raise ExposedError(
            f"--host {host} would let in everybody who reaches this machine: give --tenants FILE (tessera key makes "
            "keys for it) or --api-key KEY, or --allow-anonymous"
        )
    return host


def browser_check(
    tenants: Tenants | None, names: Iterable[str | None], allowed: Sequence[str], origins: Iterable[str] = ()
) -> BrowserCheck | None:
    """The check of browsers for a server of these and this machine's names; ``None`` with keys, which pages lack.

    ``allowed`` are names of ``--allowed-host``, for whose default ports a proxy may ask by another name; ``origins``
    are vLLM's ``--allowed-origins``.
    """
    if tenants is not None:
        return None
    proxies = [f"{scheme}://{name.lower()}" for name in allowed for scheme in ("http", "https")]
    own = [*filter(None, names), *allowed, socket.gethostname(), socket.getfqdn()]
    return BrowserCheck(own, [*origins, *proxies])


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
