# SPDX-License-Identifier: Apache-2.0
"""Parts of HTTP messages that middleware reads: the path, the body, and whether the response is a stream of events.

JSON is parsed once: by the first middleware that asks, for all behind it and for the endpoint. Parsing keeps all other
threads waiting. Long bodies are parsed in a thread, so that the event loop has its turns before the endpoint checks the
fields; by pydantic's parser, which takes a tenth of the time of Python's for fractions, and no halves of characters.
"""

import asyncio
import re
from codecs import BOM_UTF8
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from http import HTTPStatus
from json import JSONDecodeError
from typing import Any, Final, ParamSpec, TypeVar
from urllib.parse import quote, unquote

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.routing import APIRoute, request_response
from pydantic_core import from_json
from python_multipart.multipart import parse_options_header
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine_ext.client.threads import in_thread

P = ParamSpec("P")
Result = TypeVar("Result")
QUICK_BYTES: Final = 1 << 16
"""Bytes that the event loop parses, checks or hashes itself; longer bodies go to a thread."""
SPLIT: Final = "/v1/rag/split"
"""The endpoint whose body is a file."""
_JSON: Final = "tessera.json"
"""Where a request's scope has what :func:`parsed_object` has parsed."""
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
    parsed = _Json.of(body).value
    return parsed if isinstance(parsed, dict) else None


async def read_body(receive: Receive) -> bytes | None:
    """The whole body; ``None`` if the client disconnects first."""
    parts = await read_parts(receive)
    return None if parts is None else b"".join(parts)


async def read_parts(receive: Receive) -> list[bytes] | None:
    """The whole body, in the parts in which it came; ``None`` if the client disconnects first."""
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return parts


def has_files(scope: Scope) -> bool:
    """Whether a request's body is a file, or a form that may have some, and not to be read as JSON."""
    return _is_form(scope) or path_of(scope) == SPLIT


def _is_form(scope: Scope) -> bool:
    return Headers(scope=scope).get("content-type", "").lower().startswith("multipart/")


def replay(parts: Iterable[bytes | memoryview], receive: Receive) -> Receive:
    """A ``receive`` that yields a body's parts first, and takes them from a deque, then later messages (a disconnect).

    The event loop goes on between them: who reads a large file as one part would hold it.
    """
    coming = parts if isinstance(parts, deque) else deque(parts)

    async def replayed() -> Message:
        if not coming:
            return await receive()
        await asyncio.sleep(0)
        return {"type": "http.request", "body": bytes(coming.popleft()), "more_body": bool(coming)}

    return replayed


def cut(parts: Iterable[bytes], most_bytes: int = QUICK_BYTES) -> Iterator[memoryview]:
    """The parts' bytes in shorter ones; no bytes are copied."""
    for part in parts:
        for at in range(0, max(1, len(part)), most_bytes):
            yield memoryview(part)[at : at + most_bytes]


def held(
    send: Send, is_held: Callable[[Message], bool], finish: Callable[[Message, list[bytes]], Awaitable[None]]
) -> Send:
    """A ``send`` that keeps back a response whose start ``is_held``; when whole, ``finish`` gets start and parts."""
    start: Message | None = None
    parts: list[bytes] = []

    async def holding(message: Message) -> None:
        nonlocal start
        if message["type"] == "http.response.start" and is_held(message):
            start = message
        elif start is None:
            await send(message)
        else:
            parts.append(message.get("body", b""))
            if not message.get("more_body"):
                await finish(start, parts)

    return holding


def is_event_stream(start: Message) -> bool:
    """Whether a response that begins with ``start`` is an event stream, and not compressed by another middleware."""
    headers = Headers(raw=start.get("headers", []))
    return headers.get("content-type", "").startswith("text/event-stream") and "content-encoding" not in headers


class PlainPathsMiddleware:
    """Answers ``HEAD`` as ``GET`` without the body, and a path with a slash at the end as the one without.

    It stands outside everything that looks at a path. A redirection would lead to the address of a replica, and many
    clients don't follow one with a body.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            return await self._app(scope, receive, send)
        path, raw = path_of(scope), scope.get("raw_path")
        # Two slashes are refused, not taken for one.
        if path.endswith("/") and path != "/" and not path.endswith("//"):
            scope = {**scope, "path": scope["path"][:-1], "raw_path": raw.removesuffix(b"/") if raw else raw}
        if scope.get("method") == "HEAD":
            return await self._app({**scope, "method": "GET"}, receive, _without_body(send))
        return await self._app(scope, receive, send)


def _without_body(send: Send) -> Send:
    async def bare(message: Message) -> None:
        await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

    return bare


@dataclass(frozen=True, slots=True)
class _Json:
    """A body, and the value in it, or what is wrong with it."""

    body: bytes
    value: Any = None
    wrong: str | None = None

    @classmethod
    def of(cls, body: bytes) -> "_Json":
        try:
            return cls(body, from_json(body.removeprefix(BOM_UTF8), cache_strings="none"))
        except ValueError as error:
            return cls(body, wrong=str(error))


async def in_thread_if_long(
    num_bytes: int, call: Callable[P, Result], *arguments: P.args, **fields: P.kwargs
) -> Result:
    """The result of work on so many bytes of a body; the event loop does little of it itself."""
    if num_bytes > QUICK_BYTES:
        return await in_thread(call, *arguments, **fields)
    return call(*arguments, **fields)


async def parsed_object(scope: Scope, body: bytes) -> dict[str, Any] | None:
    """The JSON object in a request's body, not to be changed; ``None`` for anything else."""
    known: _Json | None = scope.get(_JSON)
    if known is None or known.body != body:
        known = scope[_JSON] = await in_thread_if_long(len(body), _Json.of, body)
    return known.value if isinstance(known.value, dict) else None


def remember(scope: Scope, body: bytes, value: Any) -> None:
    """Remember what is in a body that was written here."""
    scope[_JSON] = _Json(body, value)


def hand_over(app: FastAPI) -> None:
    """Give the endpoints of an application what middleware has parsed."""
    for route in app.routes:
        if isinstance(route, APIRoute):
            route.app = request_response(_with_parsed(route.get_route_handler()))


def _with_parsed(handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    async def handled(request: Request) -> Response:
        if _is_form(request.scope):
            _, options = parse_options_header(request.headers["content-type"])
            if options.get(b"charset", b"utf-8").lower() != b"utf-8":
                raise HTTPException(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "forms are in UTF-8")
        return await handler(_ParsedRequest(request.scope, request.receive))

    return handled


class _ParsedRequest(Request):
    """A request whose JSON is parsed already, unless another middleware has changed the body since."""

    async def body(self) -> bytes:
        if has_files(self.scope):  # to join a large one would hold the event loop
            raise HTTPException(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "the body is a form, not JSON")
        return await super().body()

    async def json(self) -> Any:
        known: _Json | None = self.scope.get(_JSON)
        body = await self.body()
        if known is None or known.body != body:
            known = _Json.of(body)
        if known.wrong is not None:
            error = JSONDecodeError(known.wrong, "", 0)
            error.args = (known.wrong,)  # which says where
            raise error
        return known.value
