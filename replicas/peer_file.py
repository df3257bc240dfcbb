# SPDX-License-Identifier: Apache-2.0
"""Files of other replicas, read from the socket into the memory that is returned.

HTTP clients that hand out parts cost more than computing short chunks: each byte is copied three times.
"""

import http.client
import socket
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from http import HTTPStatus
from typing import Final
from urllib.parse import urlsplit

from replicas.signing import HEADER, PeerKey

FINGERPRINT_HEADER: Final = "x-tessera-fingerprint"
"""In requests to replicas: the engine whose KV is wanted."""


class PeerFileError(Exception):
    """The replica gave no file; the message says why."""


def fetch_file(
    url: str,
    key: PeerKey,
    fingerprint: str,
    max_bytes: int,
    limit_s: float,
    allocate: Callable[[int], memoryview],
) -> memoryview | None:
    """The body of a GET in memory from ``allocate``; ``None`` for 404. Blocks for ``limit_s`` seconds at most.

    ``key`` signs the request and must have signed the answer. Raises :class:`PeerFileError`, also for more than
    ``max_bytes``. Follows no redirect and uses no proxy.
    """
    parts = urlsplit(url)
    target = parts._replace(scheme="", netloc="").geturl()
    signature = key.sign("GET", target)
    headers = {HEADER: signature, FINGERPRINT_HEADER: fingerprint}
    connect = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    try:
        with closing(connect(parts.netloc, timeout=limit_s)) as connection:
            connection.connect()
            end = threading.Timer(limit_s, _end, [connection.sock])  # a socket's own limit is for each read
            end.daemon = True
            end.start()
            try:
                connection.request("GET", target, headers=headers)
                response = connection.getresponse()
                body = _body(response, max_bytes, allocate)
            finally:
                end.cancel()
        if body is not None:
            key.check_answer(response.headers.get(HEADER), signature, response.status, body)
        return body
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise PeerFileError(f"{url}: {type(error).__name__}: {error}") from error


def _body(
    response: http.client.HTTPResponse, max_bytes: int, allocate: Callable[[int], memoryview]
) -> memoryview | None:
    if response.status == HTTPStatus.NOT_FOUND:
        return None
    if response.status != HTTPStatus.OK:
        raise ValueError(f"status {response.status}")
    length = response.length
    if length is None or length > max_bytes:
        raise ValueError(f"{length} bytes; the file can have {max_bytes}")
    body = allocate(length)
    if (num_read := response.readinto(body)) < length:
        raise ValueError(f"the connection ended or took too long, after {num_read} of {length} bytes")
    return body


def _end(connected: socket.socket) -> None:
    """Wakes a thread that reads from the socket."""
    with suppress(OSError):
        connected.shutdown(socket.SHUT_RDWR)
