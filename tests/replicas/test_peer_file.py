# SPDX-License-Identifier: Apache-2.0
"""Files of replicas that are right, wrong, slow, hanging or dead, over real sockets."""

import socket
import threading
from collections.abc import Callable

import pytest

from replicas.peer_file import PeerFileError, fetch_file
from tests.support.peer_files import peer

CONTENT = bytes(range(256)) * 300


def replying(status: str, body: bytes, length: int | None = None) -> Callable[[socket.socket, bytes], None]:
    head = f"HTTP/1.1 {status}\r\ncontent-length: {len(body) if length is None else length}\r\n\r\n".encode()
    return lambda connection, _: connection.sendall(head + body)


def fetched(url: str, limit_s: float = 20.0, max_bytes: int = len(CONTENT)) -> memoryview | None:
    return fetch_file(
        f"{url}/a?rank=1", {"authorization": "Bearer x"}, max_bytes, limit_s, lambda n: memoryview(bytearray(n))
    )


def test_a_file_is_asked_for_with_the_headers_and_comes_whole() -> None:
    asked: list[bytes] = []

    def answer(connection: socket.socket, request: bytes) -> None:
        asked.append(request)
        replying("200 OK", CONTENT)(connection, request)

    with peer(answer) as url:
        assert fetched(url) == CONTENT
    assert asked[0].startswith(b"GET /a?rank=1 HTTP/1.1\r\n")
    assert b"authorization: Bearer x\r\n" in asked[0]


def test_what_a_replica_lacks_is_none() -> None:
    with peer(replying("404 Not Found", b"{}")) as url:
        assert fetched(url) is None


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (replying("401 Unauthorized", b"{}"), "status 401"),
        (replying("302 Found", b""), "status 302"),
        (replying("200 OK", CONTENT + b"x"), f"{len(CONTENT) + 1} bytes"),
        (replying("200 OK", CONTENT[:-1], len(CONTENT)), f"after {len(CONTENT) - 1} of"),
        (lambda connection, _: connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n" + CONTENT), "None bytes"),
        (lambda connection, _: connection.sendall(b"what?\r\n\r\n"), "BadStatusLine"),
        (lambda connection, _: None, "RemoteDisconnected"),
    ],
)
def test_what_is_no_file_says_why(answer: Callable[[socket.socket, bytes], None], why: str) -> None:
    with peer(answer) as url, pytest.raises(PeerFileError, match=why):
        fetched(url)


def test_a_replica_that_is_not_there_says_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(PeerFileError, match="refused"):
        fetched(url)


@pytest.mark.parametrize("is_trickling", [False, True])
def test_a_replica_that_hangs_or_trickles_is_left_after_the_limit(is_trickling: bool) -> None:
    over = threading.Event()

    def answer(connection: socket.socket, _: bytes) -> None:
        connection.sendall(f"HTTP/1.1 200 OK\r\ncontent-length: {len(CONTENT)}\r\n\r\n".encode())
        while not over.wait(0.01):
            if is_trickling:
                connection.sendall(b"x")

    with peer(answer) as url, pytest.raises(PeerFileError, match=r"took too long|timed out"):
        fetched(url, limit_s=0.2)
    over.set()
