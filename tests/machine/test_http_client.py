# SPDX-License-Identifier: Apache-2.0
"""Servers on this machine are asked directly, whatever proxy the environment names."""

import ast
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx
import pytest

from machine.http_client import async_http_client, http_client, is_loopback

ROOT = Path(__file__).parents[2]
ROOMS = ("app", "cache", "docker", "engine_ext", "machine", "measuring", "replicas", "research", "scripts", "training")


class Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"direct")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Answer) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{listening.server_port}"
        listening.shutdown()


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy that nobody can reach, and no exceptions from it."""
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_loopback_is_asked_directly(server: str, proxy: None, host: str) -> None:
    url = f"http://{host}:{server.rpartition(':')[2]}"
    with http_client(url) as client:
        assert client.get("/").text == "direct"
    async with async_http_client(url) as client:
        assert (await client.get("/")).text == "direct"


def test_other_hosts_are_asked_by_the_proxy(proxy: None) -> None:
    with http_client("http://tessera.invalid") as client, pytest.raises(httpx.ConnectError, match="refused"):
        client.get("/")


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:8000", True),
        ("http://127.9.9.9", True),
        ("http://LOCALHOST:8000/v1", True),
        ("http://a.localhost", True),
        ("http://[::1]:8000", True),
        ("http://0.0.0.0:8000", True),
        ("https://localhost.", True),
        ("http://10.0.0.1", False),
        ("http://localhost.example", False),
        ("http://127.0.0.1.example", False),
        ("/v1", False),
    ],
)
def test_loopback_has_many_names(url: str, expected: bool) -> None:
    assert is_loopback(url) is expected


def test_all_clients_are_made_here() -> None:
    """Except those of a cluster, which never use a proxy."""
    made = []
    for path in (path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("httpx.Client", "httpx.AsyncClient"):
                direct = any(each.arg == "trust_env" and ast.unparse(each.value) == "False" for each in node.keywords)
                made += [] if direct else [str(path.relative_to(ROOT))]
    assert set(made) == {"machine/http_client.py"}
