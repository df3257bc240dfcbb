# SPDX-License-Identifier: Apache-2.0
"""A server with ``/v1/embeddings`` and ``/v1/rerank``, whose model knows a few synonyms."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

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

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, str]:
        if path in self.answers:
            return self.answers[path]
        if path == "/v1/embeddings":
            if any(len(text) > LONGEST or not text for text in body["input"]):
                return 400, json.dumps({"error": {"message": "a text is too long"}})
            found = [{"index": i, "embedding": vector(text)} for i, text in enumerate(body["input"])]
            self.asked.append((path, body))
            return 200, json.dumps({"data": found[::-1], "model": body.get("model", "its own")})
        if path == "/v1/rerank":
            self.asked.append((path, body))
            scores = [{"index": i, "relevance_score": float(len(text))} for i, text in enumerate(body["documents"])]
            return 200, json.dumps({"results": scores[::-1]})
        return 404, "not found"

    @contextmanager
    def serving(self, port: int = 0) -> Iterator[None]:
        """Serves at ``url``."""
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                endpoint.keys.append(self.headers.get("authorization"))
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                status, text = endpoint.answer(self.path, body)
                self.send_response(status)
                self.send_header("content-length", str(len(text.encode())))
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_: object) -> None:
                pass

        with ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
            self.url = f"http://127.0.0.1:{server.server_port}/v1"
            threading.Thread(target=server.serve_forever, daemon=True).start()
            try:
                yield
            finally:
                server.shutdown()
