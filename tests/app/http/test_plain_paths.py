# SPDX-License-Identifier: Apache-2.0
"""`HEAD`, and slashes at the end of paths."""

import httpx
import pytest
from fastapi import FastAPI

from app.http.plain_paths import PlainPathsMiddleware


@pytest.fixture
async def client():
    app = FastAPI()
    app.add_api_route("/", lambda: "page")
    app.add_api_route("/v1/models", lambda: ["m"])
    app.add_api_route("/v1/chat/completions", lambda: "answer", methods=["POST"])
    app.add_middleware(PlainPathsMiddleware)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        yield client


async def test_head_has_the_headers_of_get_and_no_body(client):
    head, get = await client.head("/v1/models"), await client.get("/v1/models")
    assert (head.status_code, head.content, head.headers) == (200, b"", get.headers)


async def test_a_slash_at_the_end_changes_nothing(client):
    assert (await client.get("/v1/models/")).json() == ["m"]
    assert (await client.post("/v1/chat/completions/")).json() == "answer"
    assert (await client.get("/")).json() == "page"
    assert (await client.get("/v1/models//")).status_code in (307, 404)  # the servers refuse two slashes


async def test_the_page_keeps_its_slash_behind_a_prefix():
    app = FastAPI(root_path="/prefix")
    app.add_api_route("/", lambda: "page")
    app.add_middleware(PlainPathsMiddleware)
    transport = httpx.ASGITransport(app, root_path="/prefix")
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        assert (await client.get("/prefix/")).json() == "page"
