# SPDX-License-Identifier: Apache-2.0
"""Reads a request's body in middleware and hands it on."""

from starlette.types import Message, Receive


async def read_body(receive: Receive) -> bytes | None:
    """The whole body; ``None`` if the client disconnects first."""
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


def replay(body: bytes, receive: Receive) -> Receive:
    """A ``receive`` that yields ``body`` first, then later messages (a disconnect)."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return pending.pop() if pending else await receive()

    return replayed
