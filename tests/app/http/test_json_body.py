# SPDX-License-Identifier: Apache-2.0
"""A body of JSON is parsed once, for middleware and endpoint."""

import json
import threading
from typing import Annotated, Any

import httpx
import pytest
from fastapi import Body, FastAPI, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from app.http import messages
from app.http.messages import QUICK_BYTES, hand_over, parsed_object, read_body, remember, replay

LONG = {"text": "x" * QUICK_BYTES}


class Reads:
    """Middleware that wants to know what is in a body, and may write another one."""

    writes: dict[str, Any] | None = None
    remembers = True

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await read_body(receive)
        assert body is not None
        await parsed_object(scope, body)
        await parsed_object(scope, body)
        if self.writes is not None:
            body = json.dumps(self.writes).encode()
            if self.remembers:
                remember(scope, body, self.writes)
        await self._app(scope, replay([body], receive), send)


class Silent:
    """Middleware that passes everything on."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


@pytest.fixture
def parsed(monkeypatch) -> list[threading.Thread]:
    """The threads that have parsed a body, one for each time."""
    threads, parse = [], messages.from_json

    def noted(*given, **options):
        threads.append(threading.current_thread())
        return parse(*given, **options)

    monkeypatch.setattr(messages, "from_json", noted)
    return threads


async def answer(body: bytes, middleware: type = Reads, content_type: str = "application/json") -> httpx.Response:
    app = FastAPI()

    @app.post("/")
    async def echo(value: Annotated[dict[str, Any], Body()]) -> Any:
        return value

    @app.post("/raw")
    async def raw(request: Request) -> Any:
        return await request.json()

    hand_over(app)
    app.add_middleware(middleware)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://a") as client:
        headers = {"content-type": content_type}
        whole, read = [await client.post(path, content=body, headers=headers) for path in ("/", "/raw")]
    assert whole.status_code != 200 or whole.content == read.content
    return whole


@pytest.mark.parametrize("value", [{"a": [1, None]}, LONG])
async def test_an_endpoint_gets_what_middleware_has_parsed(parsed, value):
    body = json.dumps(value).encode()
    assert (await answer(body)).json() == value
    assert len(parsed) == 2  # one for each endpoint
    assert (threading.current_thread() in parsed) == (len(body) <= QUICK_BYTES)


@pytest.mark.parametrize("remembers", [True, False])
async def test_an_endpoint_gets_what_middleware_has_written(remembers):
    written = type("Writes", (Reads,), {"writes": {"b": 2}, "remembers": remembers})
    assert (await answer(b'{"a": 1}', written)).json() == {"b": 2}


@pytest.mark.parametrize("body", [b'{"a": ' + b"[" * QUICK_BYTES, b"{" + b" " * QUICK_BYTES, b"\xff", b"[" * 1000])
async def test_what_is_no_json_is_parsed_once_too(parsed, body):
    response = await answer(body)
    assert response.status_code in (400, 422)
    assert len(parsed) == 2


@pytest.mark.parametrize("body", ['{"a": 1}'.encode("utf-16"), b'{"a": "\\ud800"}', b'{"a": "\xed\xa0\x80"}'])
async def test_json_is_unicode_in_utf_8(body):
    assert (await answer(body)).status_code == 422
    assert (await answer(b'\xef\xbb\xbf{"a": "\xc3\xa9"}')).json() == {"a": "é"}  # a byte order mark is left out


@pytest.mark.parametrize("charset", ["", "; charset=utf-7", "; charset=unicode_escape"])
async def test_a_form_is_refused_where_json_is_wanted_in_any_charset(charset):
    """Half of a character may be spelled in others than UTF-8."""
    assert (await answer(b"--a--\r\n", Silent, f"multipart/form-data; boundary=a{charset}")).status_code == 415


async def test_without_middleware_an_endpoint_parses():
    assert (await answer(b'{"a": 1}', Silent)).json() == {"a": 1}
