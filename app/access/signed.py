# SPDX-License-Identifier: Apache-2.0
"""Signed requests of peers, as they come and as they are answered (:mod:`replicas.signing`)."""

import asyncio
import hashlib
import hmac

from starlette.types import Message, Receive, Scope, Send

from app.http.messages import QUICK_BYTES, held, is_event_stream
from replicas.signing import HEADER, PeerKey, SignatureError


def target_of(scope: Scope) -> str:
    """The path and query of a request as its client sent them."""
    path = bytes(scope.get("raw_path") or scope["path"].encode()).removeprefix(scope.get("root_path", "").encode())
    query: bytes = scope.get("query_string", b"")
    return (path + b"?" + query if query else path).decode("latin-1")


def with_digest(digest: str, receive: Receive) -> Receive:
    """A ``receive`` that raises :class:`SignatureError` at the end of a body with another SHA-256."""
    found = hashlib.sha256()

    async def checked() -> Message:
        message = await receive()
        if message["type"] == "http.request":
            found.update(message.get("body", b""))
            if not message.get("more_body") and not hmac.compare_digest(found.hexdigest(), digest):
                raise SignatureError("a body that isn't the signed one")
        return message

    return checked


def signing(key: PeerKey, signature: str, send: Send) -> Send:
    """A ``send`` that signs the answer to the request with ``signature``, unless it is a stream of events."""

    async def send_signed(start: Message, parts: list[bytes]) -> None:
        given = (signature, start["status"], parts)
        is_long = sum(map(len, parts)) > QUICK_BYTES
        mac = await asyncio.to_thread(key.sign_answer, *given) if is_long else key.sign_answer(*given)
        await send({**start, "headers": [*start.get("headers", []), (HEADER.encode(), mac.encode())]})
        for part in parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    return held(send, lambda start: not is_event_stream(start), send_signed)
