# SPDX-License-Identifier: Apache-2.0
"""Access with and without an API key, and with the peers' secret."""

import asyncio

import pytest
from fastapi import FastAPI, WebSocket
from pydantic import SecretStr
from starlette.responses import StreamingResponse
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from app.access.middleware import SECRET_HEADER, AccessMiddleware
from app.access.policy import required_role
from app.access.tenants import Tenant, Tenants, hash_of
from engine_ext.client.request import CALLER, IS_PEER


def tenant(name, *roles, **rest):
    return Tenant(name=name, keys=(hash_of(f"{name}-key"),), roles=frozenset(roles), **rest)


def known(*tenants):
    return Tenants({each.name: each for each in tenants})


@pytest.fixture
def tenants():
    return known(tenant("reader", "chat"), tenant("writer", "chat", "ingest"), tenant("root", "admin"))


@pytest.fixture
def client(tenants):
    app = FastAPI()
    app.add_middleware(AccessMiddleware, tenants=tenants)

    @app.websocket("/v1/realtime")
    async def realtime(socket: WebSocket):
        await socket.accept()
        await socket.close()

    @app.get("/v1/models")
    async def streamed():
        async def parts():
            yield CALLER.get().namespace

        return StreamingResponse(parts())

    @app.api_route("/{path:path}", methods=["GET", "POST", "PATCH", "DELETE"])
    async def whatever(path: str):
        caller = CALLER.get()
        return caller.namespace if caller else None

    return TestClient(app)


def key_of(name):
    return {"authorization": f"Bearer {name}-key"}


def error(response):
    return response.json()["error"]


@pytest.mark.parametrize("path", ["/", "/health", "/web/main.js", "/peer/chunks/00"])
def test_some_doors_are_open(client, path):
    assert client.get(path).status_code == 200


@pytest.mark.parametrize("path", ["/v1/models", "/v1/cache/stats", "/metrics", "/openapi.json", "/whatever/vllm/adds"])
def test_all_others_ask_for_a_key(client, path):
    response = client.get(path)
    assert (response.status_code, error(response)["reason"]) == (401, "missing_api_key")
    assert response.headers["www-authenticate"] == "Bearer"
    response = client.get(path, headers=key_of("nobody"))
    assert (response.status_code, error(response)["reason"]) == (401, "invalid_api_key")
    assert "nobody-key" not in response.text


@pytest.mark.parametrize(
    ("method", "path", "opened_by"),
    [
        ("POST", "/v1/chat/completions", {"reader", "writer"}),
        ("POST", "/v1/rag/plan", {"reader", "writer"}),
        ("POST", "/v1/rag/chunks", {"writer"}),
        ("GET", "/v1/rag/chunks", {"writer"}),
        ("DELETE", "/v1/rag/chunks/00", {"writer"}),
        ("POST", "/v1/cache/clear", {"root"}),
        ("POST", "/reset_prefix_cache", {"root"}),
        ("GET", "/metrics", {"root"}),
        ("POST", "/v1/load_lora_adapter", {"root"}),
        ("GET", "/v1/rag/chunksandmore", {"root"}),
        ("GET", "/web", {"root"}),
    ],
)
def test_roles(client, method, path, opened_by):
    for name in ("reader", "writer", "root"):
        response = client.request(method, path, headers=key_of(name))
        if name in opened_by:
            assert (response.status_code, response.json()) == (200, name)
        else:
            assert (response.status_code, error(response)["reason"]) == (403, "role_missing")


def test_anthropics_header(client):
    assert client.get("/v1/models", headers={"x-api-key": "reader-key"}).status_code == 200


@pytest.mark.parametrize("value", ["Basic reader-key", "reader-key", "Bearer", "Bearer ", "Bearer \xff"])
def test_other_headers_open_nothing(client, value):
    assert client.get("/v1/models", headers={"authorization": value.encode("latin-1")}).status_code == 401


def test_answers_are_streamed_in_the_callers_name(client):
    assert client.get("/v1/models", headers=key_of("reader")).text == "reader"


def test_nobody_is_left_behind(client):
    client.get("/v1/models", headers=key_of("reader"))
    assert client.get("/health").json() is None


def test_web_sockets(client):
    with pytest.raises(WebSocketDisconnect), client.websocket_connect("/v1/realtime"):
        pass
    with client.websocket_connect("/v1/realtime", headers=key_of("root")):
        pass


class TestLimits:
    @pytest.fixture
    def tenants(self):
        return known(tenant("reader", "chat", requests_per_minute=1), tenant("writer", "chat"))

    def test_concern_one_tenant(self, client):
        assert client.get("/v1/models", headers=key_of("reader")).status_code == 200
        response = client.get("/v1/models", headers=key_of("reader"))
        assert (response.status_code, error(response)["reason"]) == (429, "limit_exceeded")
        assert response.headers["retry-after"] in ("59", "60")
        assert client.get("/v1/models", headers=key_of("writer")).status_code == 200

    def test_are_new_when_the_file_says_so(self, client, tenants):
        client.get("/v1/models", headers=key_of("reader"))
        tenants.by_name()["reader"] = tenant("reader", "chat", requests_per_minute=2)
        assert client.get("/v1/models", headers=key_of("reader")).status_code == 200


async def test_a_stream_counts_until_its_end():
    release = asyncio.Event()

    async def waits(scope, receive, send):
        await release.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body"})

    door = AccessMiddleware(waits, known(tenant("reader", "chat", concurrent_requests=1)))

    async def status():
        sent = []

        async def send(message):
            sent.append(message)

        headers = [(b"authorization", b"Bearer reader-key")]
        scope = {"type": "http", "method": "GET", "path": "/v1/models", "headers": headers}
        await door(scope, None, send)
        return sent[0]["status"]

    first = asyncio.create_task(status())
    await asyncio.sleep(0)
    assert await status() == 429
    release.set()
    assert await first == 200
    assert await status() == 200


@pytest.mark.parametrize(
    "path", ["/v1/models/", "//v1/models", "/v1/models/x", "/V1/models", "/health/", "/v1/../health"]
)
def test_what_looks_alike_is_not_the_same(path):
    assert required_role("GET", path) == "admin"


def test_collections_are_read_with_chat_and_changed_with_ingest():
    for path in ("/v1/rag/collections", "/v1/rag/collections/manuals", "/v1/rag/collections/manuals/passages"):
        assert required_role("GET", path) == "chat"
        assert required_role("POST", path) == required_role("DELETE", path) == "ingest"
    assert required_role("GET", "/v1/rag/collectionsX") == "admin"


@pytest.mark.parametrize(
    ("secret", "given", "expected"),
    [
        ("the right secret", "the right secret", True),
        ("the right secret", "another secret", False),
        ("the right secret", "", False),
        ("the right secret", None, False),
        (None, "", False),
        (None, "any", False),
    ],
)
def test_only_the_secret_makes_a_peer(secret, given, expected):
    app = FastAPI()
    app.add_middleware(AccessMiddleware, tenants=None, secret=SecretStr(secret) if secret else None)

    @app.get("/")
    async def is_peer():
        return IS_PEER.get()

    asking = TestClient(app)
    headers = {SECRET_HEADER: given} if given is not None else {}
    assert asking.get("/", headers=headers).json() is expected
    assert asking.get("/").json() is False
