# SPDX-License-Identifier: Apache-2.0
"""Large bodies, slow clients and unread answers, on a real server with sockets."""

import asyncio
import json
import socket
import threading
from contextlib import suppress

import httpx
import pytest
from fastapi import FastAPI, Request
from pydantic import ByteSize
from starlette.responses import Response, StreamingResponse

from app.access import client_limits
from app.access.client_limits import ClientLimitsMiddleware
from app.http.messages import QUICK_BYTES
from tests.serving import client_of, served

LIMIT = 1000
PART = b"x" * (1 << 20)


@pytest.fixture(scope="module")
def ended():
    """Set at the end of the endless answer."""
    return threading.Event()


@pytest.fixture(scope="module")
def address(ended):
    app = FastAPI()
    app.add_middleware(ClientLimitsMiddleware, max_body_size=ByteSize(LIMIT))

    @app.post("/length")
    async def length(request: Request):
        return len(await request.body())

    @app.get("/endless")
    async def endless():
        async def parts():
            try:
                while True:
                    await asyncio.sleep(0)
                    yield PART
            finally:
                ended.set()

        return StreamingResponse(parts())

    with pytest.MonkeyPatch.context() as patched, served(app) as url:
        patched.setattr(client_limits, "CLIENT_TIMEOUT_S", 0.3)
        yield httpx.URL(url).host, httpx.URL(url).port


@pytest.fixture
def sock(address):
    with socket.create_connection(address) as sock:
        sock.settimeout(30)
        yield sock


def post(headers):
    return f"POST /length HTTP/1.1\r\nhost: x\r\n{headers}\r\n\r\n".encode()


def asked(sock, headers, *parts):
    """Status and body of the response to a request."""
    for part in (post(headers), *parts):
        sock.sendall(part)
    with sock.makefile("rb") as answer:
        head = b"".join(iter(answer.readline, b"\r\n")).lower()
        length = next(line for line in head.split(b"\r\n") if line.startswith(b"content-length"))
        return int(head.split()[1]), json.loads(answer.read(int(length.split(b":")[1])))


CHUNKED = "transfer-encoding: chunked"


def chunk(size):
    return b"%x\r\n%s\r\n" % (size, b"x" * size)


def test_a_body_as_large_as_may_be(sock):
    assert asked(sock, f"content-length: {LIMIT}", b"x" * LIMIT) == (200, LIMIT)
    assert asked(sock, CHUNKED, chunk(LIMIT - 1), chunk(1), b"0\r\n\r\n") == (200, LIMIT)


@pytest.mark.parametrize(
    ("headers", "parts", "status", "reason", "words"),
    [
        (f"content-length: {LIMIT + 1}", [], 413, "body_too_large", "larger than 1000B (--max-body-size)"),
        (CHUNKED, [chunk(LIMIT), chunk(1)], 413, "body_too_large", "larger than 1000B (--max-body-size)"),
        ("content-length: 10", [], 408, "client_too_slow", "nothing of the body came for 0.3 s"),
        (CHUNKED, [], 408, "client_too_slow", "nothing of the body came for 0.3 s"),
    ],
    ids=["said to be larger", "larger", "never comes", "never ends"],
)
def test_what_is_larger_or_never_ends(sock, headers, parts, status, reason, words):
    answered, said = asked(sock, headers, *parts)
    assert (answered, said["error"]["reason"]) == (status, reason)
    assert words in said["error"]["message"]


def test_one_that_comes_byte_by_byte(sock, monkeypatch):
    """Each in time, and the last one never."""
    monkeypatch.setattr(client_limits, "BODY_TIMEOUT_S", 0.5)
    over = threading.Event()

    def drip():
        with suppress(OSError):
            while not over.wait(0.05):
                sock.sendall(b"x")

    sock.sendall(post(f"content-length: {LIMIT}"))
    dripping = threading.Thread(target=drip)
    dripping.start()
    assert sock.recv(12) == b"HTTP/1.1 408"
    over.set()
    dripping.join()


async def test_a_body_of_many_values_is_refused_and_files_and_texts_are_not():
    async def app(scope, receive, send):
        await Response(str(len(await Request(scope, receive).body())))(scope, receive, send)

    body, text = b'{"a": [' + b"{}," * (1 << 16), json.dumps("{}," * (1 << 16)).encode()
    async with client_of(ClientLimitsMiddleware(app, ByteSize(1 << 20))) as client:
        for content, kind, status in (
            (body, "application/json", 400),
            (body, "text/plain", 400),  # vLLM's endpoints are read as JSON before they look at the type
            (body, "multipart/form-data; boundary=x", 200),
            (text, "application/json", 200),
            (b"&" * QUICK_BYTES, "application/x-www-form-urlencoded", 200),
            (b"&" * (QUICK_BYTES + 1), "application/x-www-form-urlencoded", 413),  # read in one turn
        ):
            answer = await client.post("/", content=content, headers={"content-type": kind})
            assert answer.status_code == status, (kind, status)


def test_an_answer_that_nobody_reads_ends_and_one_that_is_read_slowly_goes_on(sock, ended):
    sock.sendall(b"GET /endless HTTP/1.1\r\nhost: x\r\n\r\n")
    for _ in range(10):
        assert not ended.wait(0.1)
        left = 4 * len(PART)
        while left > 0:
            left -= len(sock.recv(left))
    assert ended.wait(30)
