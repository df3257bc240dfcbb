# SPDX-License-Identifier: Apache-2.0
"""Requests that other sites' pages send to a server without keys."""

import pytest
from starlette.responses import Response
from starlette.testclient import TestClient
from starlette.websockets import WebSocket, WebSocketDisconnect

from app.access.exposure import browser_check
from app.access.middleware import AccessMiddleware

PATH = "/v1/cache/clear"


@pytest.fixture
def done():
    """The methods of the requests that were carried out."""
    return []


@pytest.fixture
def client(done):
    async def app(scope, receive, send):
        if scope["type"] == "websocket":
            socket = WebSocket(scope, receive, send)
            await socket.accept()
            await socket.close()
        else:
            done.append(scope["method"])
            await Response()(scope, receive, send)

    origins = ["https://chat.example.org", "http://127.0.0.1:9000", "*"]
    browsers = browser_check(None, ["127.0.0.1"], ["Box.Example.org"], origins)
    return TestClient(AccessMiddleware(app, None, browsers=browsers), base_url="http://localhost:8000")


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example"},
        {"origin": "http://localhost:3000"},
        {"origin": "http://localhost"},
        {"origin": "http://127.0.0.1:3000", "host": "127.0.0.1:8000"},
        {"origin": "http://127.0.0.1:3000", "host": "127.0.0.1:8000", "sec-fetch-site": "same-site"},
        {"origin": "http://127.0.0.1", "host": "127.0.0.1:8000"},
        {"origin": "http://127.0.0.1:443", "host": "127.0.0.1"},
        {"origin": "http://127.0.0.1:8000"},
        {"origin": "https://box.example.org:3000", "host": "box.example.org:8000"},
        {"origin": "null"},
        {"origin": ""},
        {"origin": "http://localhost:8000.evil.example"},
        {"origin": "http://evil.example", "host": "evil.example"},
        {"host": "evil.example"},
        {"host": "evil.example:8000", "sec-fetch-site": "same-origin"},
        {"host": "box.example.org.evil.example"},
    ],
)
def test_another_sites_page_gets_nothing_done(client, done, headers):
    for method in ("GET", "POST", "DELETE", "OPTIONS"):
        answer = client.request(method, PATH, headers=headers)
        assert (answer.status_code, answer.json()["error"]["reason"]) == (403, "cross_site")
    assert done == []


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_nor_by_a_form_without_an_origin_but_its_links_lead_here(client, done, site):
    assert client.post(PATH, headers={"sec-fetch-site": site}).status_code == 403
    assert client.get("/", headers={"sec-fetch-site": site}).status_code == 200
    assert done == ["GET"]


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"origin": "http://localhost:8000", "sec-fetch-site": "same-origin"},
        {"origin": "https://chat.example.org", "sec-fetch-site": "cross-site"},
        {"origin": "https://box.example.org", "host": "internal:8000"},
        {"origin": "http://127.0.0.1:9000", "host": "127.0.0.1:8000", "sec-fetch-site": "same-site"},
        {"origin": "http://127.0.0.1", "host": "127.0.0.1:80"},
        {"origin": "http://[::1]:8000", "host": "[::1]:8000"},
        {"host": "127.0.0.1:8000"},
        {"host": "10.1.2.3"},
        {"host": "[::1]:8000"},
        {"host": "replica-1:8000"},
        {"host": "BOX.example.org:8000"},
        {"host": "tessera.localhost:8000"},
        {"host": "box.example.org", "origin": "https://box.example.org:443"},
    ],
)
def test_its_own_page_and_programs_do(client, headers):
    assert client.post(PATH, headers=headers).status_code == 200


def test_web_sockets_have_an_origin_too(client):
    foreign = {"origin": "https://evil.example"}
    with pytest.raises(WebSocketDisconnect), client.websocket_connect("/v1/realtime", headers=foreign):
        pass
    with client.websocket_connect("/v1/realtime", headers={"host": "localhost:8000"}):
        pass
