# SPDX-License-Identifier: Apache-2.0
"""The web page at ``/`` and its files below ``/web``; no API key needed."""

import hashlib
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, NamedTuple

from fastapi import APIRouter, Header, Response

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
    "cache-control": "no-cache",  # revalidated each time, so that an update shows at once
}

Known = Annotated[str, Header(alias="if-none-match")]
"""ETags of the files in the browser's cache."""


class File(NamedTuple):
    """A file with its headers."""

    content: bytes
    media_type: str
    etag: str


def read(path: Path) -> File:
    """Reads a file."""
    content = path.read_bytes()
    return File(content, _TYPES[path.suffix], f'"{hashlib.sha256(content).hexdigest()[:32]}"')


# Read once at import: only these files can be requested, whatever the path.
_FILES = {path.relative_to(STATIC).as_posix(): read(path) for path in sorted(STATIC.rglob("*")) if path.is_file()}


def pages(example: File | None = None) -> APIRouter:
    """The page's endpoints. A server has an ``example`` for its model; a router has the general one."""
    router = APIRouter(include_in_schema=False)

    @router.get("/")
    async def index(known: Known = "") -> Response:
        """The page. Its links are relative, so that it works behind a proxy's prefix."""
        return _answer("index.html", None, known)

    @router.get("/web/{name:path}")
    async def file(name: str, known: Known = "") -> Response:
        """A file of the page."""
        return _answer(name, example, known)

    return router


def _answer(name: str, example: File | None, known: str) -> Response:
    found = example if example is not None and name == EXAMPLE else _FILES.get(name)
    if found is None:
        return Response("not found", HTTPStatus.NOT_FOUND, HEADERS, "text/plain")
    headers = {**HEADERS, "etag": found.etag}
    if found.etag in known:
        return Response(None, HTTPStatus.NOT_MODIFIED, headers)
    return Response(found.content, HTTPStatus.OK, headers, found.media_type)
