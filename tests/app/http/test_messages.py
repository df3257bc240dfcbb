# SPDX-License-Identifier: Apache-2.0
"""Bodies are read whole, and passed on in parts; `HEAD`, and slashes at the end of paths."""

import asyncio
from typing import Any

from fastapi import FastAPI
from pydantic import ByteSize
from starlette.types import Message

from app.access.client_limits import ClientLimitsMiddleware
from app.http.messages import PlainPathsMiddleware, cut, read_parts, replay
from tests.serving import client_of


async def left() -> Message:
    return {"type": "http.disconnect"}


async def test_parts_come_again_as_they_came_then_later_messages() -> None:
    receive = replay([b"a", b"", b"b"], left)
    assert await read_parts(receive) == [b"a", b"", b"b"]
    assert await receive() == {"type": "http.disconnect"}
    assert await read_parts(receive) is None
    assert await read_parts(replay(cut([b"abcde", b"", b"f"], 2), left)) == [b"ab", b"cd", b"e", b"", b"f"]


async def test_the_event_loop_goes_on_between_parts() -> None:
    seen = []
    for number in range(5):
        asyncio.get_running_loop().call_soon(seen.append, number)
        receive = replay([b"a"], left)
        await receive()
        assert seen == list(range(number + 1))


async def test_what_reads_a_large_body_gets_it_in_parts() -> None:
    """Who parses a file as one part holds the event loop for as long as that takes."""
    parts = [b"x" * 1000] * 50
    seen: list[Any] = []

    async def app(_: Any, receive: Any, __: Any) -> None:
        seen.extend(await read_parts(receive) or ())

    async def send(_: Message) -> None:
        raise AssertionError("refused")

    scope = {"type": "http", "path": "/", "headers": []}
    await ClientLimitsMiddleware(app, ByteSize(1 << 20))(scope, replay(parts, left), send)
    assert seen == parts


def app(**settings: Any) -> FastAPI:
    made = FastAPI(**settings)
    made.add_api_route("/", lambda: "page")
    made.add_api_route("/v1/models", lambda: ["m"])
    made.add_api_route("/v1/chat/completions", lambda: "answer", methods=["POST"])
    made.add_middleware(PlainPathsMiddleware)
    return made


async def test_head_has_the_headers_of_get_and_no_body_and_a_slash_at_the_end_changes_nothing() -> None:
    async with client_of(app()) as client:
        head, get = await client.head("/v1/models"), await client.get("/v1/models")
        assert (head.status_code, head.content, head.headers) == (200, b"", get.headers)
        assert (await client.get("/v1/models/")).json() == ["m"]
        assert (await client.post("/v1/chat/completions/")).json() == "answer"
        assert (await client.get("/")).json() == "page"
        assert (await client.get("/v1/models//")).status_code in (307, 404)  # the servers refuse two slashes
    async with client_of(app(root_path="/prefix")) as client:
        assert (await client.get("/prefix/")).json() == "page"
