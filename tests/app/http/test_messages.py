# SPDX-License-Identifier: Apache-2.0
"""Bodies are read whole, and passed on in parts."""

import asyncio
from typing import Any

from pydantic import ByteSize
from starlette.types import Message

from app.access.client_limits import ClientLimitsMiddleware
from app.http.messages import read_parts, replay


async def left() -> Message:
    return {"type": "http.disconnect"}


async def test_parts_come_again_as_they_came_then_later_messages() -> None:
    receive = replay([b"a", b"", b"b"], left)
    assert await read_parts(receive) == [b"a", b"", b"b"]
    assert await receive() == {"type": "http.disconnect"}
    assert await read_parts(receive) is None


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

    await ClientLimitsMiddleware(app, ByteSize(1 << 20))(
        {"type": "http", "path": "/", "headers": []}, replay(parts, left), send
    )
    assert seen == parts
