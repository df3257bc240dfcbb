# SPDX-License-Identifier: Apache-2.0
"""Requests that other sites' pages send to a server without keys."""

import pytest
from fastapi import FastAPI, WebSocket
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from app.access.middleware import AccessMiddleware, BrowserCheck


@pytest.fixture
def done() -> list[str]:
    """The requests that were carried out."""
    return []


@pytest.fixture
def client(done: list[str]) -> TestClient:
    app = FastAPI()
    browsers = BrowserCheck(["127.0.0.1", "Box.Example.org"], ["https://chat.example.org", "*"])
    app.add_middleware(AccessMiddleware, tenants=None, browsers=browsers)

    @app.api_route("/{path:path}", methods=["GET", "POST", "DELETE", "OPTIONS"])
    async def whatever(path: str) -> str:
        done.append(path)
        return "done"

    @app.websocket("/v1/realtime")
    async def realtime(socket: WebSocket) -> None:
        await socket.accept()
        await socket.close()

    return TestClient(app, base_url="http://localhost:8000")


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE", "OPTIONS"])
@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example"},
        {"origin": "http://localhost:3000"},
        {"origin": "null"},
        {"origin": ""},
        {"origin": "http://localhost:8000.evil.example"},
        {"origin": "http://evil.example", "host": "evil.example"},
        {"host": "evil.example"},
        {"host": "evil.example:8000", "sec-fetch-site": "same-origin"},
        {"host": "box.example.org.evil.example"},
    ],
)
def test_another_sites_page_gets_nothing_done(
    client: TestClient, done: list[str], method: str, headers: dict[str, str]
) -> None:
    answer = client.request(method, "/v1/cache/clear", headers=headers)
    assert (answer.status_code, answer.json()["error"]["reason"]) == (403, "cross_site")
    assert done == []


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_nor_by_a_form_without_an_origin_but_its_links_lead_here(
    client: TestClient, done: list[str], site: str
) -> None:
    assert client.post("/v1/cache/clear", headers={"sec-fetch-site": site}).status_code == 403
    assert done == []
    assert client.get("/", headers={"sec-fetch-site": site}).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"origin": "http://localhost:8000", "sec-fetch-site": "same-origin"},
        {"origin": "https://chat.example.org", "sec-fetch-site": "cross-site"},
        {"origin": "https://box.example.org", "host": "internal:8000"},
        {"host": "127.0.0.1:8000"},
        {"host": "10.1.2.3"},
        {"host": "[::1]:8000"},
        {"host": "replica-1:8000"},
        {"host": "BOX.example.org:8000"},
        {"host": "tessera.localhost:8000"},
        {"host": "box.example.org", "origin": "https://box.example.org:443"},
    ],
)
def test_its_own_page_and_programs_do(client: TestClient, headers: dict[str, str]) -> None:
    assert client.post("/v1/cache/clear", headers=headers).status_code == 200


def test_web_sockets_have_an_origin_too(client: TestClient) -> None:
    address = "/v1/realtime"
    with (
        pytest.raises(WebSocketDisconnect),
        client.websocket_connect(address, headers={"origin": "https://evil.example"}),
    ):
        pass
    with client.websocket_connect(address, headers={"host": "localhost:8000"}):
        pass
