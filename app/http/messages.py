# SPDX-License-Identifier: Apache-2.0
"""Parts of HTTP messages that middleware reads: the path, the body, and whether the response is a stream of events."""

import json
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope


def path_of(scope: Scope) -> str:
    """The path relative to ``--root-path``, whether or not a proxy has removed that prefix."""
    return str(scope["path"]).removeprefix(scope.get("root_path", ""))


def object_in(body: bytes) -> dict[str, Any] | None:
    """Return the JSON object in a body; ``None`` for anything else."""
    try:
        parsed = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return parsed if isinstance(parsed, dict) else None


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


def is_event_stream(start: Message) -> bool:
    """Whether a response that begins with ``start`` is an event stream, and not compressed by another middleware."""
    headers = Headers(raw=start.get("headers", []))
    return headers.get("content-type", "").startswith("text/event-stream") and "content-encoding" not in headers
