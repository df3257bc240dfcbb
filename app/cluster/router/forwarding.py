# SPDX-License-Identifier: Apache-2.0
"""Requests of clients as they go on to a replica."""

from collections.abc import Iterable, Sequence
from typing import Final

import httpx
from starlette.types import Scope

from app.access.middleware import is_of_own_page
from replicas.registry import Replica
from replicas.signing import HEADER

Headers = Sequence[tuple[bytes, bytes]]

REPLICA_HEADER: Final = b"x-tessera-replica"
"""In a request: the name of the replica to use. In a response: the name of the replica that answered."""
_HOP_BY_HOP: Final = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
# The client of the replica sets these, or the router.
_OWN: Final = (b"host", b"content-length", REPLICA_HEADER, HEADER.encode())
_OF_OWN_PAGE: Final = (b"origin", b"sec-fetch-site")
"""Headers by which a browser says that a page of the router's asks: to the replica, it would be another site's."""


def forwarded(scope: Scope, replica: Replica, body: bytes, more: Headers = ()) -> httpx.Request:
    """The client's request for ``replica``, with its address and ``more`` headers."""
    url = httpx.URL(replica.url).copy_with(raw_path=raw_path(scope))
    own = (*_OWN, *_OF_OWN_PAGE) if is_of_own_page(scope) else _OWN
    headers = [pair for pair in passed_on(scope["headers"]) if pair[0] not in own]
    client = [(b"x-forwarded-for", scope["client"][0].encode())] if scope.get("client") else []
    return httpx.Request(scope["method"], url, headers=[*headers, *client, *more], content=body)


def raw_path(scope: Scope) -> bytes:
    """The undecoded path with its query."""
    path: bytes = scope.get("raw_path") or scope["path"].encode()
    query: bytes = scope["query_string"]
    return path + b"?" + query if query else path


def passed_on(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Headers without the hop-by-hop ones, and without white space around values, which the clients here don't send."""
    listed = [(name.lower(), value.strip(b" \t")) for name, value in headers]
    of_connection = {
        token.strip().lower() for name, value in listed if name == b"connection" for token in value.split(b",")
    }
    return [(name, value) for name, value in listed if name not in _HOP_BY_HOP | of_connection]
