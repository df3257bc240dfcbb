# SPDX-License-Identifier: Apache-2.0
"""Access with and without an API key, and signed by peers."""

import asyncio
import time
from urllib.parse import unquote

import pytest
from fastapi import FastAPI, Request, WebSocket
from pydantic import SecretStr
from starlette.responses import Response, StreamingResponse
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from app.access.middleware import AccessMiddleware, required_role
from app.access.tenants import Tenant, Tenants, hash_of
from engine_ext.client.request import CALLER, IS_PEER
from replicas.signing import HEADER, PeerKey


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


@pytest.mark.parametrize("path", ["/", "/health", "/web/main.js"])
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


SECRET = "the right secret"


def signed(target="/any", body=b"", *, secret=SECRET, method="POST"):
    return {HEADER: PeerKey(secret).sign(method, target, body)}


@pytest.fixture
def asking():
    app = FastAPI()
    app.add_middleware(AccessMiddleware, tenants=None, secret=SecretStr(SECRET))

    @app.post("/{path:path}")
    async def is_peer(request: Request):
        return [IS_PEER.get(), len(await request.body())]

    return TestClient(app)


def test_a_signature_makes_a_peer_once(asking):
    headers = signed(body=b"12")
    answer = asking.post("/any", headers=headers, content=b"12")
    assert answer.json() == [True, 2]
    PeerKey(SECRET).check_answer(answer.headers[HEADER], headers[HEADER], 200, answer.content)
    again = asking.post("/any", headers=headers, content=b"12")
    assert (again.status_code, error(again)["reason"]) == (403, "peers_only")
    assert asking.post("/any").json() == [False, 0]
    assert HEADER not in asking.post("/any").headers


@pytest.mark.parametrize(
    ("target", "body", "headers"),
    [
        ("/any", b"12", signed(body=b"12", secret="another secret")),
        ("/any", b"12", signed(body=b"13")),
        ("/any", b"12", signed()),
        ("/any", b"", signed(body=b"12")),
        ("/other", b"", signed()),
        ("/any?rank=1", b"", signed()),
        ("/any", b"", signed("/any?rank=1")),
        ("/any", b"", signed(method="GET")),
        ("/any", b"", {HEADER: ""}),
        ("/any", b"", {HEADER: SECRET}),
        ("/any", b"", {HEADER: "1" * 5000}),
    ],
)
def test_a_signature_of_something_else_is_refused(asking, target, body, headers):
    answer = asking.post(target, headers=headers, content=body)
    assert (answer.status_code, error(answer)["reason"]) == (403, "peers_only")


@pytest.mark.parametrize("earlier_s", [-100, -40, 40, 100])
def test_a_signature_of_another_time_is_refused(asking, earlier_s):
    headers = {HEADER: PeerKey(SECRET, lambda: time.time() - earlier_s).sign("POST", "/any")}
    assert asking.post("/any", headers=headers).status_code == 403


def test_what_an_earlier_process_may_have_answered_is_refused(asking):
    asking.post("/any")  # the application is made at the first request
    headers = {HEADER: PeerKey(SECRET, lambda: time.time() - 5).sign("POST", "/any")}
    assert asking.post("/any", headers=headers).status_code == 403


def test_without_a_secret_nobody_is_a_peer_and_peers_have_no_doors(client):
    assert client.get("/health", headers=signed("/health", method="GET")).status_code == 200
    for path in ("/peer/chunks/00", "/peer/fills", "/peer/whatever"):
        answer = client.post(path, headers=signed(path) | key_of("root"), content=b"[" * 1000)
        assert (answer.status_code, error(answer)["reason"]) == (404, "not_found")


def test_peers_doors_open_for_peers_only(asking):
    answer = asking.post("/peer/fills")
    assert (answer.status_code, error(answer)["reason"]) == (403, "peers_only")
    assert asking.post("/peer/fills", headers=signed("/peer/fills")).json() == [True, 0]


@pytest.mark.parametrize(
    "path",
    [
        "/web/../v1/rag/chat",
        "/web/./x",
        "/web/%2e%2e/v1/rag/chat",
        "/web/.%2E/v1/rag/chat",
        "/v1/rag/collections/../../cache/stats",
        "/v1/rag/collections/..%2f..%2fcache/stats",
        "/v1/rag/collections/%2e%2e%2Fx",
        "/web/..",
        "/web/.",
        "//v1/models",
        "/web//v1/models",
        "/web/..\\v1/models",
        "/web/..%5cv1/models",
        "/web/%252e%252e/v1/models",
        "/web/a%0ab",
        "/web/a%00b",
    ],
)
async def test_a_path_that_could_be_another_is_refused(tenants, path):
    """Whoever asks: the path that is authorised must be the one that is routed and sent on."""
    asked = []

    async def app(scope, receive, send):
        asked.append(scope["path"])

    sent = await sent_to(AccessMiddleware(app, tenants), "GET", path, key_of("root"))
    assert sent[0]["status"] == 400
    assert asked == []


@pytest.mark.parametrize("path", ["/health", "/", "/web/a%20b", "/web/%c3%a4.js", "/web/x/", "/web/50%25", "/web/..x"])
async def test_other_paths_are_not(tenants, path):
    async def app(scope, receive, send):
        await Response(scope["path"])(scope, receive, send)

    sent = await sent_to(AccessMiddleware(app, tenants), "GET", path)
    assert (sent[0]["status"], sent[1]["body"].decode()) == (200, unquote(path))


async def sent_to(app, method, path, headers=None, parts=()):
    """Send a request whose body comes in `parts`, taken as they are read; return the messages of the response."""
    parts, sent = iter(parts), []

    async def receive():
        part = next(parts, None)
        if part is None:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": part, "more_body": True}

    async def send(message):
        sent.append(message)

    listed = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
    scope = {"type": "http", "method": method, "path": unquote(path), "raw_path": path.encode(), "headers": listed}
    await app(scope, receive, send)
    return sent


@pytest.mark.parametrize("path", ["/health", "/web/main.js", "/v1/models", "/metrics", "/peer/fills"])
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
async def test_nothing_of_a_body_is_kept_without_a_key(tenants, method, path):
    kept = []

    async def app(scope, receive, send):
        kept.append((await receive())["body"])
        await Response()(scope, receive, send)

    preflight = {"origin": "http://x", "access-control-request-method": "POST"}
    await sent_to(AccessMiddleware(app, tenants), method, path, preflight, [b"x" * 1000] * 1000)
    assert not any(kept)


def test_options_is_a_method_like_any_other(client):
    for path in ("/metrics", "/v1/cache/stats", "/v1/rag/chat"):
        assert client.options(path).status_code == 401
        assert client.options(path, headers={"origin": "http://x"}).status_code == 401
    assert client.options("/metrics", headers=key_of("reader")).status_code == 403
    preflight = {"origin": "http://x", "access-control-request-method": "GET"}
    assert client.options("/v1/rag/chat", headers=preflight).status_code == 405  # here without vLLM's CORS middleware
