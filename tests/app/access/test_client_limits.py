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
from tests.serving import served

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


def asked(address, *parts):
    """Status and body of the response to these bytes."""
    with socket.create_connection(address) as sock:
        for part in parts:
            sock.sendall(part)
        sock.settimeout(30)
        head, body = b"", b""
        with sock.makefile("rb") as answer:
            head = b"".join(iter(answer.readline, b"\r\n")).lower()
            length = next(line for line in head.split(b"\r\n") if line.startswith(b"content-length"))
            body = answer.read(int(length.split(b":")[1]))
    return int(head.split()[1]), json.loads(body)


def post(headers):
    return f"POST /length HTTP/1.1\r\nhost: x\r\n{headers}\r\n\r\n".encode()


def chunk(size):
    return b"%x\r\n%s\r\n" % (size, b"x" * size)


def test_a_body_as_large_as_may_be(address):
    assert asked(address, post(f"content-length: {LIMIT}"), b"x" * LIMIT) == (200, LIMIT)
    parts = [post("transfer-encoding: chunked"), chunk(LIMIT - 1), chunk(1), b"0\r\n\r\n"]
    assert asked(address, *parts) == (200, LIMIT)


def test_one_that_says_it_is_larger_is_not_waited_for(address):
    status, said = asked(address, post(f"content-length: {LIMIT + 1}"))
    assert (status, said["error"]["reason"]) == (413, "body_too_large")
    assert "larger than 1000B (--max-body-size)" in said["error"]["message"]


def test_one_that_does_not_say_so(address):
    status, said = asked(address, post("transfer-encoding: chunked"), chunk(LIMIT), chunk(1))
    assert (status, said["error"]["reason"]) == (413, "body_too_large")


@pytest.mark.parametrize("headers", ["content-length: 10", "transfer-encoding: chunked"])
def test_one_that_never_ends(address, headers):
    status, said = asked(address, post(headers))
    assert (status, said["error"]["reason"]) == (408, "client_too_slow")


def test_one_that_comes_byte_by_byte(address, monkeypatch):
    """Each in time, and the last one never."""
    monkeypatch.setattr(client_limits, "BODY_TIMEOUT_S", 0.5)
    over = threading.Event()
    with socket.create_connection(address) as sock:
        sock.sendall(post(f"content-length: {LIMIT}"))

        def drip():
            with suppress(OSError):
                while not over.wait(0.05):
                    sock.sendall(b"x")

        dripping = threading.Thread(target=drip)
        dripping.start()
        sock.settimeout(30)
        assert sock.recv(12) == b"HTTP/1.1 408"
        over.set()
        dripping.join()


async def test_a_body_of_many_values_is_refused_and_files_and_texts_are_not():
    body = b'{"a": [' + b"{}," * (1 << 16)

    async def app(scope, receive, send):
        await Response(str(len(await Request(scope, receive).body())))(scope, receive, send)

    async def status(body, kind):
        sent = []

        async def receive():
            return {"type": "http.request", "body": body}

        async def send(message):
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": "/", "headers": [(b"content-type", kind)]}
        await ClientLimitsMiddleware(app, ByteSize(1 << 20))(scope, receive, send)
        return sent[0]["status"]

    assert await status(body, b"application/json") == 400
    assert await status(body, b"text/plain") == 400  # vLLM's endpoints are read as JSON before they look at the type
    assert await status(body, b"multipart/form-data; boundary=x") == 200
    assert await status(json.dumps("{}," * (1 << 16)).encode(), b"application/json") == 200


def test_an_answer_that_nobody_reads_ends(address, ended):
    with socket.create_connection(address) as sock:
        sock.sendall(b"GET /endless HTTP/1.1\r\nhost: x\r\n\r\n")
        assert ended.wait(30)


def test_one_that_is_read_slowly_but_read_goes_on(address, ended):
    ended.clear()
    with socket.create_connection(address) as sock:
        sock.sendall(b"GET /endless HTTP/1.1\r\nhost: x\r\n\r\n")
        for _ in range(10):
            assert not ended.wait(0.1)
            left = 4 * len(PART)
            while left > 0:
                left -= len(sock.recv(left))
    assert ended.wait(30)
