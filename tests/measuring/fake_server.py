# SPDX-License-Identifier: Apache-2.0
"""A small server without a model, answering as stock vLLM and Tessera do.

One character is one token; an answer's text follows from its prompt. What it has been asked is in ``requests``.
"""

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from app.documents.document import Document
from app.modes import in_mode, strategy_of
from cache.positions.layout import PositionStrategy
from cache.report import Report, ReportedChunk, ReportedTokens
from engine_ext.client.request import CacheOptions
from measuring.quality.client import FORCED_TOKENS
from tests.serving import served

CHAT, RAG, CHUNKS, CLEAR = "/v1/chat/completions", "/v1/rag/chat", "/v1/rag/chunks", "/v1/cache/clear"
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


@dataclass(frozen=True)
class Reply:
    """Text and cache report of an answer, and an error that its stream ends with."""

    text: str
    cache: Body | None = None
    error: Body | None = None


def answer_of(prompt: Prompt, max_tokens: int) -> str:
    """The same prompt has the same answer, in any namespace."""
    return (hashlib.sha256(prompt.text.encode()).hexdigest() * (1 + max_tokens // 64))[:max_tokens]


def make_report(mode: str, *statuses: str, reason: str | None = None, reused: int = 0) -> Body:
    """Clients' part of a cache report; of one cached chunk, unless there are statuses."""
    is_full = mode == "full"
    chunks = [
        ReportedChunk(index=i, id=None, key=None, tokens=9, status=None if is_full else status)
        for i, status in enumerate(statuses or ("hit",))
    ]
    options = in_mode(CacheOptions(), "shared" if is_full else mode)
    strategy = PositionStrategy.SHARED if is_full else strategy_of(mode)
    ran = {"mode": "full" if is_full else "chunked", "reason": reason, "position_strategy": strategy, "scope": "system"}
    tokens = ReportedTokens(prompt=100, reused=reused, computed=100 - reused, fill_computed=0)
    told = {"tokens": tokens, "chunks": chunks, "timings_ms": {}}
    return Report(**ran, **told, recompute=options.recompute, reread=options.reread).to_dict()


def asked_mode(body: Body) -> str:
    """The mode that a request asks for, by its name in reports."""
    cache = body.get("cache", {})
    if cache.get("mode") == "full":
        return "full"
    signs = (("+", "recompute"), ("~", "reread"))
    anew = "".join(f"{sign}{100 * cache[name]:.0f}%" for sign, name in signs if cache.get(name))
    return str(cache.get("position_strategy", "shared")) + anew


@dataclass
class FakeServer:
    """State of one server. Replace ``answer``, ``report`` or ``reply`` for answers and reports that must be refused."""

    url: str = ""
    pages_total: int = 2000
    page_tokens: int = 32
    page_bytes: int = 32 * 100
    requests: list[tuple[str, Body]] = field(default_factory=list)
    """Path and body of each request that has one, in order of arrival."""
    authorizations: set[str | None] = field(default_factory=set)
    """Of all requests."""
    fixed: dict[str, Response] = field(default_factory=dict)
    """Answers by path, whatever is asked."""
    cached: dict[tuple[str, str, str], None] = field(default_factory=dict)
    """Namespace, system prompt and text of each chunk that is cached, the oldest first."""
    off: str | None = None
    """Why the chunk cache is off, if it is."""
    forces: bool = False
    """Whether it generates the tokens that requests name, each with a log probability of −1/4."""
    lookups: Counter[str] = field(default_factory=Counter)
    answer: Callable[[Prompt, int], str] = answer_of
    report: Callable[[Body], Body] = lambda report: report
    """Given the cache report that a request should get, the one that it gets."""
    reply: Callable[[Body], Reply] | None = None
    """Given a request with chunks, the answer to it."""
    before: Callable[[], Awaitable[object]] | None = None
    """Awaited before each streamed answer, for example an ``asyncio.Barrier``'s ``wait``."""

    def bodies(self, path: str) -> list[Body]:
        return [body for asked, body in self.requests if asked == path]

    def asked(self) -> list[tuple[str, str]]:
        """First chunk and mode of each question, in order of arrival."""
        return [(body["chunks"][0]["text"], asked_mode(body)) for body in self.bodies(RAG) if body["stream"]]

    def forced(self) -> list[Body]:
        """Requests that name their tokens."""
        return [body for body in self.bodies(RAG) if not body["stream"]]

    def refuse(self, status: int, body: object, path: str = RAG) -> None:
        self.fixed[path] = JSONResponse(body, status_code=status)

    def refuse_as_vllm(self, status: int, message: str) -> None:
        self.refuse(status, {"error": {"message": message, "type": "BadRequestError", "param": None, "code": status}})

    def replied(self, body: Body) -> Reply:
        """The answer to a request with chunks, which are cached from then on."""
        prompt = rag_prompt(body)
        statuses = ["hit" if key in self.cached else "filled" for key in prompt.keys]
        self.lookups.update(statuses)
        self.keep(prompt)
        return Reply(self.answer(prompt, body["max_tokens"]), self.report(make_report(asked_mode(body), *statuses)))

    def keep(self, prompt: Prompt) -> None:
        """Caches the chunks; the oldest make room."""
        self.cached.update(dict.fromkeys(prompt.keys))
        while self.pages_free < 0:
            del self.cached[next(iter(self.cached))]

    @property
    def pages_free(self) -> int:
        return self.pages_total - sum(-(-len(Document(key[2]).render()) // self.page_tokens) for key in self.cached)


def rag_prompt(body: Body) -> Prompt:
    """The prompt of a request to ``/v1/rag/…``."""
    texts = tuple(chunk if isinstance(chunk, str) else chunk["text"] for chunk in body["chunks"])
    namespace = body.get("cache", {}).get("namespace", "default")
    return Prompt(body.get("system", ""), texts, body.get("question", ""), namespace)


async def _chat(fake: FakeServer, body: Body) -> Response:
    texts = {message["role"]: message["content"] for message in body["messages"]}
    prompt = Prompt(texts.get("system", ""), (), texts["user"])
    return _completion(fake, prompt, body, Reply(fake.answer(prompt, body["max_tokens"])))


async def _rag(fake: FakeServer, body: Body) -> Response:
    reply = (fake.reply or fake.replied)(body)
    if "vllm_xargs" in body:
        return _forced(fake, body, reply)
    return _completion(fake, rag_prompt(body), body, reply)


def _forced(fake: FakeServer, body: Body, reply: Reply) -> Response:
    """The answer to a request that names its tokens, which are its letters' numbers."""
    token_ids = body["vllm_xargs"][FORCED_TOKENS] if fake.forces else [0]
    tops = [[{"token": f"token_id:{token}", "logprob": -1 / 4}] for token in token_ids]
    logprobs = {"content": [{"logprob": -1 / 4, "top_logprobs": top} for top in tops]}
    return JSONResponse({"choices": [{"token_ids": token_ids, "logprobs": logprobs}], "cache": reply.cache})


async def _tokenize(fake: FakeServer, body: Body) -> Response:
    return JSONResponse({"tokens": [ord(letter) for letter in body["prompt"]]})


async def _ingest(fake: FakeServer, body: Body) -> Response:
    prompt = rag_prompt(body)
    fake.keep(prompt)
    lines = [*({"index": i, "status": "filled"} for i in range(len(prompt.chunks))), {"summary": {"failed": 0}}]
    return Response("".join(json.dumps(line) + "\n" for line in lines), media_type="application/x-ndjson")


async def _clear(fake: FakeServer, body: Body) -> Response:
    fake.cached = {key: None for key in fake.cached if key[0] != body["namespace"]}
    return JSONResponse({})


async def _stats(fake: FakeServer, body: Body) -> Response:
    if fake.off:
        return JSONResponse({"enabled": False, "reason": fake.off})
    sizes = {"pages_total": fake.pages_total, "pages_free": fake.pages_free, "page_tokens": fake.page_tokens}
    return JSONResponse({"enabled": True, "reason": None, "occupancy": sizes})


async def _metrics(fake: FakeServer, body: Body) -> Response:
    return PlainTextResponse(f"tessera_pool_bytes {float(fake.pages_total * fake.page_bytes)}\n")


def _always(answer: Body) -> Callable[[FakeServer, Body], Awaitable[Response]]:
    async def handler(fake: FakeServer, body: Body) -> Response:
        return JSONResponse(answer)

    return handler


def _completion(fake: FakeServer, prompt: Prompt, body: Body, reply: Reply) -> Response:
    usage = {"prompt_tokens": len(prompt.text), "completion_tokens": len(reply.text)}
    if body.get("stream"):
        return StreamingResponse(_events(fake, reply, usage), media_type="text/event-stream")
    logprobs = {"content": [_token(token) for token in reply.text]} if body.get("logprobs") else None
    message = {"role": "assistant", "content": reply.text}
    choice = {"index": 0, "message": message, "logprobs": logprobs, "finish_reason": "length"}
    return JSONResponse({"object": "chat.completion", "choices": [choice], "usage": usage, "cache": reply.cache})


def _token(token: str) -> Body:
    """A token that is far from a tie."""
    top = [{"token": token, "logprob": -0.1}, {"token": "~", "logprob": -5.0}]
    return {"token": token, "logprob": -0.1, "top_logprobs": top}


async def _events(fake: FakeServer, reply: Reply, usage: Body) -> AsyncIterator[str]:
    """Events in vLLM's order (role, text, end, usage), with the report where Tessera puts it."""
    if fake.before is not None:
        await fake.before()
    yield _event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}])
    for token in reply.text:
        await asyncio.sleep(0)
        yield _event(choices=[{"index": 0, "delta": {"content": token}}])
    if reply.error:
        yield _event(error=reply.error)
    report = {"cache": reply.cache} if reply.cache else {}
    yield _event(choices=[{"index": 0, "delta": {"content": None}, "finish_reason": "length"}], **report)
    yield _event(choices=[], usage=usage)
    yield "data: [DONE]\n\n"


def _event(**fields: Any) -> str:
    return f"data: {json.dumps({'id': 'c1', 'model': 'fake', **fields}, ensure_ascii=False)}\n\n"


_ROUTES = {
    ("POST", CHAT): _chat,
    ("POST", RAG): _rag,
    ("POST", CHUNKS): _ingest,
    ("POST", CLEAR): _clear,
    ("POST", "/tokenize"): _tokenize,
    ("GET", "/v1/cache/stats"): _stats,
    ("GET", "/v1/models"): _always({"data": [{"id": "fake"}]}),
    ("GET", "/metrics"): _metrics,
    ("GET", "/version"): _always({"version": "0.32.0"}),
    ("GET", "/health"): _always({}),
}


def make_app(fake: FakeServer) -> Starlette:
    def route(method: str, path: str, handler: Any) -> Route:
        async def endpoint(request: Request) -> Response:
            content = await request.body()
            body = json.loads(content) if content else {}
            fake.authorizations.add(request.headers.get("authorization"))
            if method == "POST":
                fake.requests.append((path, body))
            return fake.fixed.get(path) or await handler(fake, body)

        return Route(path, endpoint, methods=[method])

    return Starlette(routes=[route(*key, handler) for key, handler in _ROUTES.items()])


@contextmanager
def serving(**state: Any) -> Iterator[FakeServer]:
    """A server on a free port of loopback."""
    fake = FakeServer(**state)
    with served(make_app(fake)) as fake.url:
        yield fake
