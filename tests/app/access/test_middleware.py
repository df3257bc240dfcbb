# SPDX-License-Identifier: Apache-2.0
"""Access with and without an API key, and signed by peers."""

import asyncio
import itertools
import time
from urllib.parse import unquote

import pytest
from pydantic import SecretStr
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.testclient import TestClient
from starlette.websockets import WebSocket, WebSocketDisconnect

from app.access.middleware import AccessMiddleware
from app.access.tenants import Tenant, Tenants, hash_of
from engine_ext.client.request import CALLER, IS_PEER
from replicas.signing import HEADER, PeerKey
from tests.serving import client_of


def tenant(name, *roles, **rest):
    return Tenant(name=name, keys=(hash_of(f"{name}-key"),), roles=frozenset(roles), **rest)


def known(*tenants):
    return Tenants({each.name: each for each in tenants})


@pytest.fixture
def tenants():
    return known(tenant("reader", "chat"), tenant("writer", "chat", "ingest"), tenant("root", "admin"))


async def tells_the_caller(scope, receive, send):
    async def parts():
        yield caller.namespace if (caller := CALLER.get()) else "nobody"

    if scope["type"] == "websocket":
        socket = WebSocket(scope, receive, send)
        await socket.accept()
        await socket.close()
    else:
        await StreamingResponse(parts())(scope, receive, send)


@pytest.fixture
def client(tenants):
    return TestClient(AccessMiddleware(tells_the_caller, tenants))


def key_of(name):
    return {"authorization": f"Bearer {name}-key"}


def seen(answer):
    """Its status, and who asked, or the reason of the refusal."""
    return answer.status_code, answer.json()["error"]["reason"] if answer.is_error else answer.text


@pytest.mark.parametrize("path", ["/", "/health", "/web/main.js"])
def test_some_doors_are_open(client, path):
    client.get("/v1/models", headers=key_of("reader"))
    assert seen(client.get(path)) == (200, "nobody")


@pytest.mark.parametrize("path", ["/v1/models", "/v1/cache/stats", "/metrics", "/openapi.json", "/whatever/vllm/adds"])
def test_all_others_ask_for_a_key(client, path):
    answer = client.get(path)
    assert (seen(answer), answer.headers["www-authenticate"]) == ((401, "missing_api_key"), "Bearer")
    answer = client.get(path, headers=key_of("nobody"))
    assert seen(answer) == (401, "invalid_api_key")
    assert "nobody-key" not in answer.text


@pytest.mark.parametrize(
    ("paths", "opened_by"),
    [
        (["POST /v1/chat/completions", "POST /v1/rag/plan"], {"reader", "writer"}),
        (["GET /v1/rag/collections", "GET /v1/rag/collections/manuals/passages"], {"reader", "writer"}),
        (["POST /v1/rag/chunks", "GET /v1/rag/chunks", "DELETE /v1/rag/chunks/00"], {"writer"}),
        (["POST /v1/rag/collections/manuals", "DELETE /v1/rag/collections/manuals"], {"writer"}),
        (["POST /v1/cache/clear", "GET /metrics", "OPTIONS /metrics", "POST /v1/load_lora_adapter"], {"root"}),
        # What looks alike is not the same.
        (["GET /v1/rag/chunksandmore", "GET /v1/rag/collectionsX", "GET /v1/models/"], {"root"}),
        (["GET /V1/models", "GET /health/", "GET /web"], {"root"}),
    ],
)
def test_roles(client, paths, opened_by):
    for name, path in itertools.product(("reader", "writer", "root"), paths):
        answer = client.request(*path.split(" "), headers=key_of(name))
        assert seen(answer) == ((200, name) if name in opened_by else (403, "role_missing")), path
    assert seen(client.get("/v1/models", headers={"x-api-key": "reader-key"})) == (200, "reader")  # Anthropic's header


@pytest.mark.parametrize("value", ["Basic reader-key", "reader-key", "Bearer", "Bearer ", "Bearer \xff"])
def test_other_headers_open_nothing(client, value):
    assert client.get("/v1/models", headers={"authorization": value.encode("latin-1")}).status_code == 401


def test_options_need_a_key_unless_a_browser_asks_what_it_may_send(client):
    origin = {"origin": "http://x"}
    assert client.options("/v1/rag/chat").status_code == 401
    assert client.options("/v1/rag/chat", headers=origin).status_code == 401
    preflight = origin | {"access-control-request-method": "GET"}
    assert seen(client.options("/v1/rag/chat", headers=preflight)) == (200, "nobody")


def test_web_sockets(client):
    with pytest.raises(WebSocketDisconnect), client.websocket_connect("/v1/realtime"):
        pass
    with client.websocket_connect("/v1/realtime", headers=key_of("root")):
        pass


def test_limits_concern_one_tenant_and_are_new_when_the_file_says_so():
    tenants = known(tenant("reader", "chat", requests_per_minute=1), tenant("writer", "chat"))
    client = TestClient(AccessMiddleware(tells_the_caller, tenants))
    assert client.get("/v1/models", headers=key_of("reader")).status_code == 200
    answer = client.get("/v1/models", headers=key_of("reader"))
    assert seen(answer) == (429, "limit_exceeded")
    assert answer.headers["retry-after"] in ("59", "60")
    assert client.get("/v1/models", headers=key_of("writer")).status_code == 200
    tenants.by_name()["reader"] = tenant("reader", "chat", requests_per_minute=2)
    assert client.get("/v1/models", headers=key_of("reader")).status_code == 200


async def test_a_stream_counts_until_its_end():
    has_begun, may_end = asyncio.Event(), asyncio.Event()

    async def waits(scope, receive, send):
        has_begun.set()
        await may_end.wait()
        await Response()(scope, receive, send)

    door = AccessMiddleware(waits, known(tenant("reader", "chat", concurrent_requests=1)))
    async with client_of(door) as client:
        client.headers.update(key_of("reader"))
        first = asyncio.create_task(client.get("/v1/models"))
        await has_begun.wait()
        assert (await client.get("/v1/models")).status_code == 429
        may_end.set()
        assert (await first).status_code == 200
        assert (await client.get("/v1/models")).status_code == 200


SECRET = "the right secret"


def signed(target="/any", body=b"", *, secret=SECRET, method="POST"):
    return {HEADER: PeerKey(secret).sign(method, target, body)}


async def tells_whether_it_is_a_peer(scope, receive, send):
    body = await Request(scope, receive).body()
    await JSONResponse([IS_PEER.get(), len(body)])(scope, receive, send)


@pytest.fixture
def asking():
    return TestClient(AccessMiddleware(tells_whether_it_is_a_peer, None, SecretStr(SECRET)))


def test_a_signature_makes_a_peer_once(asking):
    headers = signed(body=b"12")
    answer = asking.post("/any", headers=headers, content=b"12")
    assert answer.json() == [True, 2]
    PeerKey(SECRET).check_answer(answer.headers[HEADER], headers[HEADER], 200, answer.content)
    assert seen(asking.post("/any", headers=headers, content=b"12")) == (403, "peers_only")
    unsigned = asking.post("/any")
    assert (unsigned.json(), HEADER in unsigned.headers) == ([False, 0], False)


@pytest.mark.parametrize(
    ("target", "body", "headers"),
    [
        ("/any", b"12", signed(body=b"12", secret="another secret")),
        ("/any", b"12", signed(body=b"13")),
        ("/any", b"12", signed()),
        ("/any", b"", signed(body=b"12")),
        ("/other", b"", signed()),
        ("/any?part=1", b"", signed()),
        ("/any", b"", signed("/any?part=1")),
        ("/any", b"", signed(method="GET")),
        *(("/any", b"", {HEADER: value}) for value in ("", SECRET, "1" * 5000)),
    ],
)
def test_a_signature_of_something_else_is_refused(asking, target, body, headers):
    assert seen(asking.post(target, headers=headers, content=body)) == (403, "peers_only")


@pytest.mark.parametrize("earlier_s", [-40, 5, 40], ids=["later", "before the start", "earlier"])
def test_a_signature_of_another_time_is_refused(asking, earlier_s):
    """Also one that an earlier process may have answered."""
    headers = {HEADER: PeerKey(SECRET, lambda: time.time() - earlier_s).sign("POST", "/any")}
    assert asking.post("/any", headers=headers).status_code == 403


def test_peers_doors_open_for_peers_only_and_without_a_secret_for_nobody(asking, client):
    assert seen(asking.post("/peer/fills")) == (403, "peers_only")
    assert asking.post("/peer/fills", headers=signed("/peer/fills")).json() == [True, 0]
    assert client.get("/health", headers=signed("/health", method="GET")).status_code == 200
    for path in ("/peer/chunks/00", "/peer/fills", "/peer/whatever"):
        answer = client.post(path, headers=signed(path) | key_of("root"), content=b"[" * 1000)
        assert seen(answer) == (404, "not_found")


async def answer_at(path, tenants):
    """The status and the path as an app sees it, if the middleware lets the request pass."""
    sent = []

    async def tells_the_path(scope, receive, send):
        await Response(scope["path"])(scope, receive, send)

    async def send(message):
        sent.append(message)

    key = (b"authorization", b"Bearer root-key")
    scope = {"type": "http", "method": "GET", "path": unquote(path), "raw_path": path.encode(), "headers": [key]}
    await AccessMiddleware(tells_the_path, tenants)(scope, None, send)
    return sent[0]["status"], sent[1]["body"].decode()


@pytest.mark.parametrize(
    "path",
    [
        *("/web/../v1/rag/chat", "/web/./x", "/web/%2e%2e/v1/rag/chat", "/web/.%2E/v1/rag/chat", "/web/..", "/web/."),
        *("/v1/rag/collections/..%2f..%2fcache/stats", "//v1/models", "/web//v1/models", "/web/..\\v1/models"),
        *("/web/..%5cv1/models", "/web/%252e%252e/v1/models", "/web/a%0ab", "/web/a%00b"),
    ],
)
async def test_a_path_that_could_be_another_is_refused(tenants, path):
    """Whoever asks: the path that is authorised must be the one that is routed and sent on."""
    status, _ = await answer_at(path, tenants)
    assert status == 400


@pytest.mark.parametrize("path", ["/health", "/", "/web/a%20b", "/web/%c3%a4.js", "/web/x/", "/web/50%25", "/web/..x"])
async def test_other_paths_are_not(tenants, path):
    assert await answer_at(path, tenants) == (200, unquote(path))


@pytest.mark.parametrize("path", ["/health", "/web/main.js", "/v1/models", "/metrics", "/peer/fills"])
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
def test_nothing_of_a_body_is_kept_without_a_key(tenants, method, path):
    kept = []

    async def app(scope, receive, send):
        kept.append(await Request(scope, receive).body())
        await Response()(scope, receive, send)

    preflight = {"origin": "http://x", "access-control-request-method": "POST"}
    TestClient(AccessMiddleware(app, tenants)).request(method, path, headers=preflight, content=b"x" * 1000)
    assert not any(kept)
