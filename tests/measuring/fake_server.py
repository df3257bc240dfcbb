# SPDX-License-Identifier: Apache-2.0
"""A small server without a model, answering as stock vLLM and Tessera do.

One character is one token; an answer's text follows from its prompt. What it has been asked is in ``requests``.
"""

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from app.documents.document import Document
from tests.serving import served

Body = dict[str, Any]


@dataclass(frozen=True)
class Prompt:
    """A request as the engine would see it."""

    system: str
    chunks: tuple[str, ...]
    question: str
    namespace: str = "default"

    @property
    def keys(self) -> list[tuple[str, str, str]]:
        return [(self.namespace, self.system, chunk) for chunk in self.chunks]

    @property
    def text(self) -> str:
        return self.system + "".join(Document(chunk).render() for chunk in self.chunks) + self.question


def answer_of(prompt: Prompt, max_tokens: int) -> str:
    """The same prompt has the same answer, in any namespace."""
    return (hashlib.sha256(prompt.text.encode()).hexdigest() * (1 + max_tokens // 64))[:max_tokens]


@dataclass
class FakeServer:
    """State of one server. Replace ``answer`` or ``report`` for answers and cache reports that must be refused."""

    url: str = ""
    pages_total: int = 2000
    page_tokens: int = 32
    page_bytes: int = 32 * 100
    requests: list[tuple[str, Body]] = field(default_factory=list)
    """Path and body of each request, in order of arrival."""
    cached: dict[tuple[str, str, str], None] = field(default_factory=dict)
    """Namespace, system prompt and text of each chunk that is cached, the oldest first."""
    off: str | None = None
    """Why the chunk cache is off, if it is."""
    lookups: Counter[str] = field(default_factory=Counter)
    running: int = 0
    most_running: int = 0
    """The most answers that were under way at once."""
    answer: Callable[[Prompt, int], str] = answer_of
    report: Callable[[Body], Body] = lambda report: report
    """Given the cache report that a request should get, the one that it gets."""
    before: Callable[[], Any] | None = None
    """Awaited before each streamed answer, for example an ``asyncio.Barrier``'s ``wait``."""

    def bodies(self, path: str) -> list[Body]:
        return [body for asked, body in self.requests if asked == path]

    def look_up(self, prompt: Prompt) -> list[str]:
        """The chunks' statuses; from then on they are cached."""
        statuses = ["hit" if key in self.cached else "filled" for key in prompt.keys]
        self.lookups.update(statuses)
        self.keep(prompt)
        return statuses

    def keep(self, prompt: Prompt) -> None:
        """Caches the chunks; the oldest make room."""
        self.cached.update(dict.fromkeys(prompt.keys))
        while self.pages_free < 0:
            del self.cached[next(iter(self.cached))]

    @property
    def pages_free(self) -> int:
        return self.pages_total - sum(-(-len(Document(key[2]).render()) // self.page_tokens) for key in self.cached)


def chat_prompt(body: Body) -> Prompt:
    """A chat completion's prompt, split at ``cache.separator`` if it has one."""
    texts = {message["role"]: _content(message["content"]) for message in body["messages"]}
    options = body.get("cache", {})
    separator = options.get("separator")
    *chunks, question = texts["user"].split(separator) if separator else [texts["user"]]
    return Prompt(texts.get("system", ""), tuple(chunks), question, options.get("namespace", "default"))


def rag_prompt(body: Body) -> Prompt:
    """The prompt of a request to ``/v1/rag/…``."""
    texts = tuple(chunk if isinstance(chunk, str) else chunk["text"] for chunk in body["chunks"])
    namespace = body.get("cache", {}).get("namespace", "default")
    return Prompt(body.get("system", ""), texts, body.get("question", ""), namespace)


def make_report(prompt: Prompt, statuses: list[str]) -> Body:
    """Tessera's report of a request that ran chunked."""
    chunks = [
        {"index": i, "id": None, "key": f"{i:x}", "tokens": len(Document(text).render()), "status": status}
        for i, (text, status) in enumerate(zip(prompt.chunks, statuses, strict=True))
    ]
    reused = sum(chunk["tokens"] for chunk in chunks if chunk["status"] == "hit")
    tokens = {"prompt": len(prompt.text), "reused": reused, "computed": len(prompt.text) - reused, "fill_computed": 0}
    timings = dict.fromkeys(("plan", "fill", "queue", "first_token", "total"), 0.0)
    fixed = {"reason": None, "position_strategy": "shared", "scope": "system"}
    return {"mode": "chunked", **fixed, "tokens": tokens, "chunks": chunks, "timings_ms": timings}


async def _chat(fake: FakeServer, body: Body) -> Response:
    prompt = chat_prompt(body)
    if not prompt.chunks:
        return _completion(fake, prompt, body, None)
    report = fake.report(make_report(prompt, fake.look_up(prompt)))
    return _completion(fake, prompt, body, {"kv_transfer_params": {"cache": report}})


async def _rag(fake: FakeServer, body: Body) -> Response:
    prompt = rag_prompt(body)
    report = fake.report(make_report(prompt, fake.look_up(prompt)))
    return _completion(fake, prompt, body, {"cache": report})


async def _ingest(fake: FakeServer, body: Body) -> Response:
    prompt = rag_prompt(body)
    filled = len(set(prompt.keys) - set(fake.cached))
    fake.keep(prompt)
    lines = [{"index": i, "id": None, "key": f"{i:x}", "status": "filled"} for i in range(len(prompt.chunks))]
    summary = {"documents": len(lines), "hit": len(lines) - filled, "filled": filled, "waited": 0, "failed": 0}
    text = "".join(json.dumps(line) + "\n" for line in [*lines, {"summary": summary}])
    return Response(text, media_type="application/x-ndjson")


async def _clear(fake: FakeServer, body: Body) -> Response:
    gone = [key for key in fake.cached if body.get("namespace") in (None, key[0])]
    for key in gone:
        del fake.cached[key]
    return JSONResponse({"cleared": len(gone)})


async def _stats(fake: FakeServer, body: Body) -> Response:
    if fake.off:
        return JSONResponse({"enabled": False, "reason": fake.off})
    sizes = {"pages_total": fake.pages_total, "pages_free": fake.pages_free, "page_tokens": fake.page_tokens}
    counters = {"lookups": dict(fake.lookups)}
    return JSONResponse({"enabled": True, "reason": None, "occupancy": sizes, "counters": counters})


async def _models(fake: FakeServer, body: Body) -> Response:
    return JSONResponse({"object": "list", "data": [{"id": "fake", "object": "model", "root": "fake"}]})


async def _metrics(fake: FakeServer, body: Body) -> Response:
    return PlainTextResponse(f"tessera_pool_bytes {float(fake.pages_total * fake.page_bytes)}\n")


async def _version(fake: FakeServer, body: Body) -> Response:
    return JSONResponse({"version": "0.32.0"})


async def _health(fake: FakeServer, body: Body) -> Response:
    return Response()


def _completion(fake: FakeServer, prompt: Prompt, body: Body, report: Body | None) -> Response:
    max_tokens = body.get("max_tokens") or body["max_completion_tokens"]
    text = fake.answer(prompt, max_tokens)
    counts = {"prompt_tokens": len(prompt.text), "completion_tokens": len(text)}
    if body.get("stream"):
        return StreamingResponse(_events(fake, text, counts, report or {}), media_type="text/event-stream")
    message = {"role": "assistant", "content": text}
    logprobs = {"content": [_token(token) for token in text]} if body.get("logprobs") else None
    choice = {"index": 0, "message": message, "logprobs": logprobs, "finish_reason": "length"}
    return JSONResponse({"object": "chat.completion", "choices": [choice], "usage": counts, **(report or {})})


def _token(token: str) -> Body:
    """A token that is far from a tie."""
    top = [{"token": token, "logprob": -0.1}, {"token": "~", "logprob": -5.0}]
    return {"token": token, "logprob": -0.1, "top_logprobs": top}


async def _events(fake: FakeServer, text: str, usage: Body, report: Body) -> AsyncIterator[str]:
    """Events in vLLM's order (role, text, end, usage), then Tessera's report."""
    fake.running += 1
    fake.most_running = max(fake.most_running, fake.running)
    try:
        if fake.before is not None:
            await fake.before()
        yield _event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}])
        for token in text:
            await asyncio.sleep(0)
            yield _event(choices=[{"index": 0, "delta": {"content": token}}])
        yield _event(choices=[{"index": 0, "delta": {"content": None}, "finish_reason": "length"}])
        yield _event(choices=[], usage=usage)
        if report:
            yield _event(choices=[], **report)
        yield "data: [DONE]\n\n"
    finally:
        fake.running -= 1


def _event(**fields: Any) -> str:
    return f"data: {json.dumps({'id': 'c1', 'object': 'chat.completion.chunk', 'model': 'fake', **fields})}\n\n"


def _content(content: str | list[Body]) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


_ROUTES = {
    ("POST", "/v1/chat/completions"): _chat,
    ("POST", "/v1/rag/chat"): _rag,
    ("POST", "/v1/rag/chunks"): _ingest,
    ("POST", "/v1/cache/clear"): _clear,
    ("GET", "/v1/cache/stats"): _stats,
    ("GET", "/v1/models"): _models,
    ("GET", "/metrics"): _metrics,
    ("GET", "/version"): _version,
    ("GET", "/health"): _health,
}


def make_app(fake: FakeServer) -> Starlette:
    def route(method: str, path: str, handler: Any) -> Route:
        async def endpoint(request: Request) -> Response:
            content = await request.body()
            body = json.loads(content) if content else {}
            if method == "POST":
                fake.requests.append((path, body))
            return await handler(fake, body)

        return Route(path, endpoint, methods=[method])

    return Starlette(routes=[route(*key, handler) for key, handler in _ROUTES.items()])


@contextmanager
def serving(**state: Any) -> Iterator[FakeServer]:
    """A server on a free port of loopback."""
    fake = FakeServer(**state)
    with served(make_app(fake)) as fake.url:
        yield fake
