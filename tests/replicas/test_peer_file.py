# SPDX-License-Identifier: Apache-2.0
"""Files of replicas that are right, wrong, slow, hanging or dead, over real sockets."""

import socket
import threading
from collections.abc import Callable

import pytest

from replicas.peer_file import PeerFileError, fetch_file
from replicas.signing import HEADER, PeerKey
from tests.support.peer_files import peer

CONTENT = bytes(range(256)) * 300
KEY = PeerKey("a secret of replicas")


def replying(status: str, body: bytes, length: int | None = None) -> Callable[[socket.socket, bytes], None]:
    """An answer signed as a replica does."""
    said = len(body) if length is None else length

    def answer(connection: socket.socket, request: bytes) -> None:
        mac = KEY.sign_answer(signature_of(request), int(status[:3]), [body])
        connection.sendall(f"HTTP/1.1 {status}\r\ncontent-length: {said}\r\n{HEADER}: {mac}\r\n\r\n".encode() + body)

    return answer


def signature_of(request: bytes) -> str:
    (line,) = [line for line in request.decode().split("\r\n") if line.startswith(f"{HEADER}: ")]
    return line.partition(": ")[2]


def fetched(url: str, limit_s: float = 20.0, max_bytes: int = len(CONTENT)) -> memoryview | None:
    return fetch_file(f"{url}/a?part=1", KEY, "engine", max_bytes, limit_s, lambda n: memoryview(bytearray(n)))


def test_a_file_is_asked_for_with_the_headers_and_comes_whole() -> None:
    asked: list[bytes] = []

    def answer(connection: socket.socket, request: bytes) -> None:
        asked.append(request)
        replying("200 OK", CONTENT)(connection, request)

    with peer(answer) as url:
        assert fetched(url) == CONTENT
    assert asked[0].startswith(b"GET /a?part=1 HTTP/1.1\r\n")
    assert b"x-tessera-fingerprint: engine\r\n" in asked[0]
    assert KEY.signed_request(signature_of(asked[0]), "GET", "/a?part=1")
    assert b"a secret of replicas" not in asked[0]


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


@pytest.mark.parametrize("change", ["first byte", "last byte", "another's answer", "another secret", "no signature"])
def test_a_file_that_is_not_the_replicas_is_refused(change: str) -> None:
    """From whatever answers at its address."""

    def answer(connection: socket.socket, request: bytes) -> None:
        body, signature, key = bytearray(CONTENT), signature_of(request), KEY
        if change == "another's answer":
            signature = KEY.sign("GET", "/a?part=1")
        if change == "another secret":
            key = PeerKey("a secret of nobody's")
        mac = "" if change == "no signature" else key.sign_answer(signature, 200, [body])
        if "byte" in change:
            body[0 if "first" in change else -1] ^= 1
        head = f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}\r\n{HEADER}: {mac}\r\n\r\n".encode()
        connection.sendall(head + body)

    with peer(answer) as url, pytest.raises(PeerFileError, match="isn't signed"):
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
