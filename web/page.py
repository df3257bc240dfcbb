# SPDX-License-Identifier: Apache-2.0
"""Serves the web page at ``/`` and its files below ``/web``, without an API key."""

import hashlib
from http import HTTPStatus
from pathlib import Path
from typing import NamedTuple

from fastapi import APIRouter, Request, Response

from web.example import STATIC

EXAMPLE = "example.json"
_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
}
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # cached, but revalidated each time: updates show at once
}

router = APIRouter(include_in_schema=False)


class File(NamedTuple):
    """A file, ready to send."""

    content: bytes
    media_type: str
    etag: str


def read(path: Path) -> File:
    """Reads the file at ``path``."""
    content = path.read_bytes()
    return File(content, _TYPES[path.suffix], f'"{hashlib.sha256(content).hexdigest()[:32]}"')


# Read once at import: no request path can reach any other file.
_FILES = {path.relative_to(STATIC).as_posix(): read(path) for path in sorted(STATIC.rglob("*")) if path.is_file()}


@router.get("/")
async def index(request: Request) -> Response:
    """The page. Its links are relative, so that it works behind a proxy's prefix."""
    return _answer(request, "index.html")


@router.get("/web/{name:path}")
async def file(request: Request, name: str) -> Response:
    """A file of the page; the example is the server model's own, if known."""
    return _answer(request, name)


def _answer(request: Request, name: str) -> Response:
    found: File | None = getattr(request.app.state, "tessera_example", None) if name == EXAMPLE else None
    found = found or _FILES.get(name)
    if found is None:
        return Response("not found", HTTPStatus.NOT_FOUND, HEADERS, "text/plain")
    headers = {**HEADERS, "etag": found.etag}
    if found.etag in request.headers.get("if-none-match", ""):
        return Response(None, HTTPStatus.NOT_MODIFIED, headers)
    return Response(found.content, HTTPStatus.OK, headers, found.media_type)
