# SPDX-License-Identifier: Apache-2.0
"""A server with ``/v1/embeddings`` and ``/v1/rerank``, whose model knows a few synonyms."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tests.serving import served

MEANINGS = (("cat", "feline", "kitten"), ("car", "automobile"), ("house", "home", "dwelling"), ("rain", "wet"))
LONGEST = 1000
"""Characters that it takes of a text."""


def vector(text: str) -> list[float]:
    """How often a text names each meaning; the last number keeps it from being zero."""
    return [*(3.0 * sum(text.lower().count(word) for word in words) for words in MEANINGS), 0.5]


class EndpointStandIn:
    """Notes what it is asked; ``answers`` maps a path to the status and body that it gives instead."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.keys: list[str | None] = []
        self.answers: dict[str, tuple[int, str]] = {}
        self.url = ""

    @property
    def texts(self) -> list[str]:
        """All texts that it gave embeddings of, in order."""
        return [text for path, body in self.asked if path == "/v1/embeddings" for text in body["input"]]

    async def answer(self, request: Request) -> Response:
        path, body = request.url.path, await request.json()
        self.keys.append(request.headers.get("authorization"))
        if path in self.answers:
            status, text = self.answers[path]
            return Response(text, status)
        if any(len(text) > LONGEST or not text for text in body.get("input", [])):
            return JSONResponse({"error": {"message": "a text is too long"}}, 400)
        self.asked.append((path, body))
        if path == "/v1/rerank":
            scores = [{"index": i, "relevance_score": float(len(text))} for i, text in enumerate(body["documents"])]
            return JSONResponse({"results": scores[::-1]})
        found = [{"index": i, "embedding": vector(text)} for i, text in enumerate(body["input"])]
        return JSONResponse({"data": found[::-1], "model": body.get("model", "its own")})

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Serves at ``url``."""
        routes = [Route(f"/v1/{name}", self.answer, methods=["POST"]) for name in ("embeddings", "rerank")]
        with served(Starlette(routes=routes)) as url:
            self.url = f"{url}/v1"
            yield
