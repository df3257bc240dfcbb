# SPDX-License-Identifier: Apache-2.0
"""Questions, results, and a small server on loopback that speaks as `/v1/rag/chat` does."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.datastructures import Headers
from starlette.types import ASGIApp

from app.documents.document import Document
from app.http.sse import ReportInserter
from app.modes import recompute_of, strategy_of
from cache.lease import ChunkStatus
from cache.positions.layout import PositionStrategy
from cache.report import Report, ReportedChunk, ReportedTokens
from engine_ext.client.request import CacheOptions, Ticket
from measuring.quality.client import FORCED_TOKENS
from measuring.quality.metrics import REFUSAL
from measuring.quality.questions.questions import Question
from measuring.quality.results import Result, RunSettings
from tests.serving import served

TEMPLATE_ERROR = (
    "As of transformers v4.44, default chat template is no longer allowed, so you must provide a chat template if the "
    "tokenizer does not define one."
)


def make_question(id: str = "1", *chunks: str, answers: tuple[str, ...] = ("Riga",), **fields) -> Question:
    texts = tuple(Document(text) for text in chunks or ("Falcon is in Riga.",))
    given = {"system": "", "chunks": texts, "question": "Where is Falcon?", **fields}
    return Question(id=id, answers=answers, **given)


def write_questions(path: Path, count: int) -> Path:
    """Questions q0, q1, … in Tessera's format; the first chunk answers two thirds."""
    records = [
        {
            "id": f"q{i}",
            "chunks": [f"Town {i} is in Latvia."] * (i % 3 + 1),
            "question": "Where?",
            "answers": [] if i % 3 == 2 else ["Latvia"],
        }
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def make_report(mode: str, *statuses: str, reason: str | None = None, reused: int = 0) -> dict:
    """Clients' part of a cache report."""
    strategy = PositionStrategy.SHARED if mode == "full" else strategy_of(mode)
    statuses = [None] if mode == "full" else [ChunkStatus(status) for status in statuses or ("hit",)]
    return Report(
        mode="full" if mode == "full" else "chunked",
        reason=reason,
        position_strategy=strategy,
        scope="system",
        tokens=ReportedTokens(prompt=100, reused=reused, computed=100 - reused, fill_computed=0),
        chunks=[ReportedChunk(index=i, id=None, key=None, tokens=9, status=each) for i, each in enumerate(statuses)],
        timings_ms={},
        recompute=0 if mode == "full" else recompute_of(mode),
    ).to_dict()


def make_result(mode: str = "full", question: str = "1", text: str = "In Riga.", **fields) -> Result:
    answered = {"ttft_s": 0.5, "total_s": 1.0, "cache": make_report(mode)}
    given = {"question": question, "mode": mode, "chunks": 1, "answers": ("Riga",), "text": text, **answered, **fields}
    return Result(**given)


def make_settings(**fields) -> RunSettings:
    settings = {
        "questions": "q.jsonl",
        "questions_sha256": "ab",
        "modes": ("full", "shared"),
        "model": None,
        "server_arguments": (),
        "served_model": "m",
        "max_tokens": 64,
        "refusal": REFUSAL,
        "concurrency": 1,
        "tessera": "0.1.0",
        "vllm": "0.32.0",
    }
    return RunSettings(**settings | fields)


@dataclass
class Reply:
    """The server's answer to a request. ``before`` is called after the first event, which has no text."""

    text: str
    cache: dict | None
    before: Callable[[], object] = lambda: None
    error: dict | None = None


@dataclass
class FakeServer:
    """Answers with the first chunk, in the mode asked for; ``reply`` and ``refusals`` change that."""

    url: str = ""
    requests: list[dict] = field(default_factory=list)
    headers: list[dict] = field(default_factory=list)
    reply: Callable[[dict], Reply] = lambda body: Reply(body["chunks"][0]["text"], make_report(asked_mode(body)))
    refusals: dict[str, JSONResponse] = field(default_factory=dict)
    forces: bool = False
    """Whether it generates the tokens that requests name, each with a log probability of −1/4."""
    forced: list[dict] = field(default_factory=list)
    """Requests that name their tokens."""
    tokenized: list[str] = field(default_factory=list)
    ingested: Callable[[dict], object] = lambda body: None
    stats: object = field(default_factory=lambda: {"enabled": True, "reason": None})

    def refuse(self, status: int, body: object, path: str = "/v1/rag/chat") -> None:
        self.refusals[path] = JSONResponse(body, status_code=status)

    def refuse_as_vllm(self, status: int, message: str) -> None:
        self.refuse(status, {"error": {"message": message, "type": "BadRequestError", "param": None, "code": status}})

    def asked(self) -> list[tuple[str, str]]:
        """First chunk and mode of each request, in the order of arrival."""
        return [(body["chunks"][0]["text"], asked_mode(body)) for body in self.requests]


def asked_mode(body: dict) -> str:
    cache = body["cache"]
    anew = cache.get("recompute")
    return (cache.get("position_strategy") or cache["mode"]) + (f"+{100 * anew:.0f}%" if anew else "")


def _event(*choices: dict) -> bytes:
    data = {"id": "c1", "object": "chat.completion.chunk", "created": 5, "model": "m", "choices": choices}
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n".encode()


def _stream(reply: Reply) -> Iterator[bytes]:
    """Events as vLLM makes them, with the report where Tessera puts it."""
    ticket = Ticket(CacheOptions())
    inserter = ReportInserter(ticket, "cache")
    yield inserter.feed(_event({"index": 0, "delta": {"role": "assistant", "content": ""}}))
    reply.before()
    middle = len(reply.text) // 2
    for part in filter(None, (reply.text[:middle], reply.text[middle:])):
        yield inserter.feed(_event({"index": 0, "delta": {"content": part}}))
    if reply.error:
        yield inserter.feed(f"data: {json.dumps({'error': reply.error})}\n\n".encode())
    if reply.cache:
        ticket.report = reply.cache
    yield inserter.feed(_event({"index": 0, "delta": {"content": None}, "finish_reason": "stop"}))
    yield inserter.feed(b"data: [DONE]\n\n")


def _forced(fake: FakeServer, body: dict) -> dict:
    """The answer to a request that names its tokens, which are its letters' numbers."""
    fake.forced.append(body)
    token_ids = body["vllm_xargs"][FORCED_TOKENS] if fake.forces else [0]
    tops = [[{"token": f"token_id:{token}", "logprob": -1 / 4}] for token in token_ids]
    logprobs = {"content": [{"logprob": -1 / 4, "top_logprobs": top} for top in tops]}
    return {"choices": [{"token_ids": token_ids, "logprobs": logprobs}], "cache": fake.reply(body).cache}


def _app(fake: FakeServer) -> ASGIApp:
    app = FastAPI()

    async def refusing(scope, receive, send):
        answer = app
        if scope["type"] == "http":
            fake.headers.append(dict(Headers(scope=scope)))
            answer = fake.refusals.get(scope["path"], app)
        await answer(scope, receive, send)

    @app.post("/v1/rag/chat")
    def chat(body: dict):
        if not body["stream"]:
            return _forced(fake, body)
        fake.requests.append(body)
        return StreamingResponse(_stream(fake.reply(body)), media_type="text/event-stream")

    @app.post("/tokenize")
    def tokenize(body: dict):
        fake.tokenized.append(body["prompt"])
        return {"tokens": [ord(letter) for letter in body["prompt"]]}

    @app.post("/v1/rag/chunks")
    def chunks(body: dict):
        fake.requests.append(body)
        fake.ingested(body)
        lines = [{"index": i, "status": "filled"} for i in range(len(body["chunks"]))]
        return StreamingResponse(json.dumps(line) + "\n" for line in [*lines, {"summary": {}}])

    @app.get("/v1/cache/stats")
    def stats():
        return fake.stats

    @app.get("/v1/models")
    def models():
        return {"object": "list", "data": [{"id": "m", "object": "model"}]}

    @app.get("/version")
    def version():
        return {"version": "0.32.0"}

    return refusing


@contextmanager
def serving() -> Iterator[FakeServer]:
    """A server on a free port of loopback."""
    fake = FakeServer()
    with served(_app(fake)) as fake.url:
        yield fake
