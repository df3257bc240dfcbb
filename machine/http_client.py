# SPDX-License-Identifier: Apache-2.0
"""HTTP clients that ask this machine directly, whatever proxy the environment names."""

import ipaddress
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final
from urllib.parse import urlsplit

import httpx

CONNECTIONS: Final = httpx.Limits(keepalive_expiry=2)
"""Any number of connections. Close an unused one after 2 s: uvicorn closes it after 5 s, and a request sent at that
moment is lost."""


def is_loopback(url: str) -> bool:
    """Whether a URL's host is this machine, by name or number."""
    host = (urlsplit(url).hostname or "").rstrip(".")
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    address = getattr(address, "ipv4_mapped", None) or address
    return address.is_loopback or address.is_unspecified


def http_client(url: str, **options: Any) -> httpx.Client:
    """A client for the server at ``url``; raises ``httpx.UnsupportedProtocol`` if it can't be asked."""
    with _told():
        return httpx.Client(base_url=url, trust_env=not is_loopback(url), limits=CONNECTIONS, **options)


def async_http_client(url: str, **options: Any) -> httpx.AsyncClient:
    """As :func:`http_client`, for an event loop."""
    with _told():
        return httpx.AsyncClient(base_url=url, trust_env=not is_loopback(url), limits=CONNECTIONS, **options)


@contextmanager
def _told() -> Iterator[None]:
    """One error for a URL that is none, and for a proxy of the environment that httpx doesn't know or can't use."""
    try:
        yield
    except (httpx.InvalidURL, ValueError, ImportError) as error:
        raise httpx.UnsupportedProtocol(str(error)) from error
