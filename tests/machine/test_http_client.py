# SPDX-License-Identifier: Apache-2.0
"""Servers on this machine are asked directly, whatever proxy the environment names."""

import ast
import asyncio

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

import machine.http_client
from app.collections.retrieval import make_retriever
from app.collections.retrievers import UnknownRetrieverError
from app.settings import Settings
from machine.http_client import CONNECTIONS, async_http_client, http_client, is_loopback
from machine.server_process import ROOT
from tests.serving import served

ROOMS = ("app", "cache", "docker", "engine_ext", "machine", "measuring", "replicas", "research", "scripts", "training")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_loopback_is_asked_directly_and_others_by_the_proxy(host, monkeypatch):
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with served(Starlette(routes=[Route("/", lambda _: PlainTextResponse("direct"))])) as url:
        url = url.replace("127.0.0.1", host)
        with http_client(url) as client:
            assert client.get("/").text == "direct"
        async with async_http_client(url) as client:
            assert (await client.get("/")).text == "direct"
    with http_client("http://tessera.invalid") as client, pytest.raises(httpx.ConnectError, match="refused"):
        client.get("/")


@pytest.mark.parametrize("proxy", ["socks5://127.0.0.1:9", "gopher://127.0.0.1:9"])  # httpx needs a package; unknown
def test_a_proxy_that_cant_be_used_concerns_others_than_loopback(proxy, monkeypatch):
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ALL_PROXY", proxy)
    http_client("http://127.0.0.1:8000").close()
    for make in (http_client, async_http_client):
        with pytest.raises(httpx.UnsupportedProtocol, match=r"proxy"):
            make("http://tessera.invalid")
    with pytest.raises(UnknownRetrieverError, match=r"tessera.invalid/v1 can't be asked: .*proxy"):
        make_retriever(Settings(retriever="http://tessera.invalid/v1"))


@pytest.mark.parametrize("url", ["http://[::1", "http://127.0.0.1:port"])
def test_a_url_that_is_none_is_told(url):
    with pytest.raises(httpx.UnsupportedProtocol):
        http_client(url)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.9.9.9", True),
        ("http://LOCALHOST:8000/v1", True),
        ("http://a.localhost", True),
        ("http://[::1]:8000", True),
        ("http://[::ffff:127.0.0.1]:8000", True),
        ("http://[::ffff:10.0.0.1]:8000", False),
        ("http://0.0.0.0:8000", True),
        ("https://localhost.", True),
        ("http://10.0.0.1", False),
        ("http://localhost.example", False),
        ("http://127.0.0.1.example", False),
        ("/v1", False),
    ],
)
def test_loopback_has_many_names(url, expected):
    assert is_loopback(url) is expected


async def test_an_unused_connection_is_not_used_again(monkeypatch):
    """Its server may be closing it. A request that was sent meanwhile would be lost."""
    monkeypatch.setattr(machine.http_client, "CONNECTIONS", httpx.Limits(keepalive_expiry=0.01))
    clients = []

    def note(request):
        clients.append(request.client)
        return PlainTextResponse("")

    with served(Starlette(routes=[Route("/", note)])) as url, http_client(url) as client:
        for _ in range(2):
            client.get("/")
            await asyncio.sleep(0.05)
        async with async_http_client(url) as other:
            for _ in range(2):
                await other.get("/")
                await asyncio.sleep(0.05)
    assert len(set(clients)) == 4
    assert CONNECTIONS.keepalive_expiry < uvicorn.Config("").timeout_keep_alive


def test_all_clients_are_made_here():
    """Except those of a cluster, which never use a proxy."""
    made = set()
    for path in (path for room in ROOMS for path in (ROOT / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("httpx.Client", "httpx.AsyncClient"):
                options = [ast.unparse(each) for each in node.keywords]
                made |= set() if "trust_env=False" in options else {str(path.relative_to(ROOT))}
    assert made == {"machine/http_client.py"}
