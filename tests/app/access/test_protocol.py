# SPDX-License-Identifier: Apache-2.0
"""Limits of heads: of what comes before a body, or within one, without belonging to it."""

import asyncio
import socket
import struct
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse

from app.access.client_limits import MOST_HEAD_BYTES, MOST_HEADERS, MOST_WAITING, BoundedProtocol
from tests.serving import served

PART = b"a" * (MOST_HEAD_BYTES // 4)
ONE = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"
SLOW = b"GET /?slow HTTP/1.1\r\nhost: a\r\n\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"


FAILED: list[Exception] = []
"""What went wrong when answers were sent."""


async def answer(scope, receive, send):
    body = await Request(scope, receive).body()
    if scope["query_string"] == b"slow":
        await asyncio.sleep(0.2)
    text = f"{len(scope['query_string'])} {len(scope['headers'])} {len(body)}"
    try:
        await PlainTextResponse(text)(scope, receive, send)
    except Exception as error:
        FAILED.append(error)


@pytest.fixture(scope="module")
def address() -> Iterator[tuple[str, int]]:
    with served(answer, http=BoundedProtocol) as url:
        parts = urlsplit(url)
        yield parts.hostname or "", parts.port or 0


def answered(address: tuple[str, int], *parts: bytes) -> str:
    """The server's answer to these parts, or whether it closed the connection."""
    with socket.create_connection(address, timeout=10) as connection:
        try:
            for part in parts:
                connection.sendall(part)
            connection.shutdown(socket.SHUT_WR)
            return connection.recv(1000).decode()
        except OSError:
            return "closed"


@pytest.mark.parametrize(
    "opening",
    [b"GET /", b"GET / HTTP/1.1\r\nhost: ", b"GET / HTTP/1.1\r\n", CHUNKED + b"1;", CHUNKED + b"0\r\na: "],
    ids=["path", "value", "name", "chunk's extension", "trailer"],
)
def test_a_head_without_end_is_cut_off(address, opening):
    said = answered(address, opening, *[PART] * 400)
    assert said == "closed" or said.startswith("HTTP/1.1 400 ")


@pytest.mark.parametrize("number", [MOST_HEADERS, MOST_HEADERS + 1])
def test_headers_are_counted(address, number):
    said = answered(address, b"GET / HTTP/1.1\r\n", b"a: b\r\n" * number, b"\r\n")
    assert said.startswith("HTTP/1.1 200 " if number == MOST_HEADERS else "HTTP/1.1 400 ")


@pytest.mark.parametrize("number", [MOST_WAITING, 5 * MOST_WAITING])
def test_requests_that_wait_are_counted(address, number):
    said = b""
    with socket.create_connection(address, timeout=10) as connection:
        connection.sendall(SLOW + ONE * (number - 1))
        while said.count(b"HTTP/1.1 ") < number and (more := connection.recv(1 << 16)):
            said += more
    assert (b"HTTP/1.1 400 " in said) == (number > MOST_WAITING)
    assert not failures_when_all_are_answered(address)


def failures_when_all_are_answered(address) -> list[Exception]:
    """What went wrong, when a slow request that came later has its answer."""
    with socket.create_connection(address, timeout=10) as connection:
        connection.sendall(SLOW)
        assert connection.recv(1000).startswith(b"HTTP/1.1 200 ")
    return FAILED


def test_whoever_leaves_requests_behind_leaves_no_failures(address):
    with socket.create_connection(address, timeout=10) as connection:
        connection.sendall(SLOW + ONE * 3)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # reset
    assert not failures_when_all_are_answered(address)


def test_what_people_send_passes(address):
    """A long query, then a long header, then a body in many small parts, on one connection."""
    query = b"GET /?" + b"q" * (MOST_HEAD_BYTES - 1000) + b" HTTP/1.1\r\nhost: a\r\n\r\n"
    header = b"GET / HTTP/1.1\r\nhost: a\r\ncookie: " + b"c" * (MOST_HEAD_BYTES - 1000) + b"\r\n\r\n"
    body = CHUNKED + b"1\r\nx\r\n" * 50_000 + b"0\r\n\r\n"
    with socket.create_connection(address, timeout=10) as connection:
        for request, said in ((query, f"{MOST_HEAD_BYTES - 1000} 1 0"), (header, "0 2 0"), (body, "0 2 50000")):
            connection.sendall(request)
            assert connection.recv(1000).decode().endswith(said)


@pytest.mark.parametrize(
    ("said", "is_taken"),
    [
        (b"10.9.8.7", True),
        (b"10.9.8.7:4242, 127.0.0.1", True),
        (b"fe80::1", True),
        (b"[fe80::1]:4242", True),
        (b'10.9.8.7:4242 - "DELETE /x HTTP/1.1" 200 OK \x85\x9b2J', False),
        (b"10.9.8.7, unknown", False),
        (b"fe80::1%\x9b2J", False),
        (b"1.2.3", False),
        (b"", False),
    ],
)
def test_a_forwarded_client_is_an_address(address, said, is_taken):
    found = answered(address, b"GET / HTTP/1.1\r\nhost: a\r\nx-Forwarded-For: " + said + b"\r\n\r\n")
    assert found.endswith(f"0 {1 + is_taken} 0")
