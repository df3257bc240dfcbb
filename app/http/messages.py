# SPDX-License-Identifier: Apache-2.0
"""Parts of HTTP messages that middleware reads: the path, the body, and whether the response is a stream of events."""

import asyncio
import json
import re
from typing import Any, Final
from urllib.parse import quote, unquote

from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope

_PART_BYTES: Final = 1 << 16
_AMBIGUOUS: Final = re.compile(r"//|/\.\.?(?:/|$)|\\")


def path_of(scope: Scope) -> str:
    """The path relative to ``--root-path``, whether or not a proxy has removed that prefix: the one that is routed."""
    path, root = str(scope["path"]), scope.get("root_path", "")
    return path[len(root) :] if path == root or path.startswith(f"{root}/") else path


def is_plain(scope: Scope) -> bool:
    """Whether a request's path means the same to all who read it: normalising or decoding it again changes nothing."""
    path: str = scope["path"]
    raw = bytes(scope.get("raw_path") or quote(path).encode())
    return (
        path.startswith("/")
        and path.isprintable()
        and unquote(path) == path == unquote(raw)
        and not _AMBIGUOUS.search(path)
        and not any(code in raw.lower() for code in (b"%2e", b"%2f", b"%5c"))
    )


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


def is_form(scope: Scope) -> bool:
    """Whether a request's body is a form, with files perhaps, and not to be read as JSON."""
    return Headers(scope=scope).get("content-type", "").lower().startswith("multipart/")


def replay_in_parts(body: bytes, receive: Receive) -> Receive:
    """As :func:`replay`, in parts between which others run: forms are parsed on the event loop, byte by byte."""
    starts = iter(range(0, max(len(body), 1), _PART_BYTES))

    async def replayed() -> Message:
        if (start := next(starts, None)) is None:
            return await receive()
        await asyncio.sleep(0)
        end = start + _PART_BYTES
        return {"type": "http.request", "body": body[start:end], "more_body": end < len(body)}

    return replayed


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
