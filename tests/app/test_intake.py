# SPDX-License-Identifier: Apache-2.0
"""Requests that reach vLLM's endpoints behind the middleware."""

import asyncio
import json
import threading
from types import SimpleNamespace

import httpx
import pytest
from fastapi import FastAPI
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from app.documents.rag_request import PlanRequest
from app.errors import answer_errors
from app.intake import CheckedFieldsMiddleware, DocumentsMiddleware, take_found
from app.prompt.known import KnownPassages
from app.prompt.marks import MarkedPrompt
from app.settings import Settings
from cache.positions.layout import PositionStrategy, unpack
from engine_ext.client.request import PROGRESS, CacheOptions
from tests.app.bodies import bodies
from tests.app.helpers import make_report
from tests.serving import client_of
from tests.support.context import make_context

CHAT = "/v1/chat/completions"
PATHS = [CHAT, "/v1/completions", "/v1/responses", "/v1/messages"]
USER = {"role": "user", "content": "why?"}
DOCUMENTS = {"model": "m", "messages": [USER], "documents": [{"id": "d1", "text": "one"}, "two"]}


LAST = {"id": "c1", "choices": [{"finish_reason": "stop"}]}


class Server:
    """Fake vLLM that records each body and splits a chat's marked text."""

    def __init__(self, **settings):
        paths = [*PATHS, "/v1/embeddings"]
        routes = [Route(path, self.answer, methods=["GET", "POST"]) for path in paths]
        self.context = context = make_context(settings=Settings(**settings))
        self.app = Starlette(routes=routes, middleware=[Middleware(DocumentsMiddleware, context=context)])
        self.marks = context.marks
        self.bodies: list[bytes] = []
        self.prompts: list[MarkedPrompt] = []
        self.headers: list[dict[str, str]] = []
        self.stream_headers: dict[str, str] = {}
        self.events = ['data: {"id": "c1"}\n\n', f"data: {json.dumps(LAST)}\n\n", "data: [DONE]\n\n"]

    async def answer(self, request: Request):
        body = await request.body()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        if not self.marks.are_in(body.decode(errors="replace")):
            return JSONResponse({"path": request.url.path})
        parsed = json.loads(body)
        field = next(name for name in ("messages", "input", "prompt") if name in parsed)
        place = parsed[field] if isinstance(parsed[field], str) else parsed[field][0]["content"]
        prompt = self.marks.split(place)
        self.prompts.append(prompt)
        prompt.ticket.report = make_report().to_dict()
        if parsed.get("stream"):
            return StreamingResponse(self._stream(), media_type="text/event-stream", headers=self.stream_headers)
        return JSONResponse({"answer": 42})

    async def _stream(self):
        for event in self.events:
            yield event

    async def post(self, path: str, body) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with client_of(self.app) as client:
            return await client.post(path, content=content, headers={"content-type": "application/json"})


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "body",
    [
        b'{ "messages": [{"role":"user","content":"why?"}],  "input":"x", "prompt": "x", "stream": true }',
        b'{"messages": [{"role": "user", "content": "about \\"documents\\" and \\"cache\\""}]}',
        b'{"cache": null}',
        b'{"documents": ' + b"[" * 100_000,
        b'["documents"]',
        b'\xff"documents"',
        b"",
    ],
    ids=range(7),
)
async def test_bodies_without_anything_of_ours_pass_byte_for_byte(path, body):
    server = Server(chunk_separator=" # # ")
    response = await server.post(path, body)
    assert response.json() == {"path": path}
    assert server.bodies == [body]
    assert server.headers[0]["content-length"] == str(len(body))


async def test_documents_are_looked_for_in_threads():
    threads = []

    class Known(KnownPassages):
        def find(self, namespace, text):
            threads.append(threading.current_thread())
            return super().find(namespace, text)

    server = Server(documents="auto")
    server.context.engine = SimpleNamespace(renderer=SimpleNamespace(known=Known()))
    server.context.retrieval = SimpleNamespace(collections=SimpleNamespace(texts=lambda _: []))
    await server.post(CHAT, {"messages": [USER]})
    assert server.bodies == [json.dumps({"messages": [USER]}).encode()]  # there are none
    await take_found(server.context, PlanRequest(messages=[USER]))
    assert len(threads) == 2
    assert threading.current_thread() not in threads


async def test_other_endpoints_methods_and_protocols_pass_untouched():
    server, seen = Server(), []
    body = json.dumps(DOCUMENTS).encode()
    await server.post("/v1/embeddings", body)
    async with client_of(server.app) as client:
        await client.request("GET", CHAT, content=body)
    assert server.bodies == [body, body]

    async def endpoint(scope, receive, send):
        seen.append(scope["type"])

    for kind in ("websocket", "lifespan"):
        await DocumentsMiddleware(endpoint, make_context())({"type": kind, "path": CHAT}, None, None)
    assert seen == ["websocket", "lifespan"]


async def test_documents_reach_the_endpoint_as_marked_text():
    server = Server(chunk_mode="parallel")
    response = await server.post(CHAT, DOCUMENTS | {"temperature": 0, "cache": {"namespace": "n", "explain": True}})
    assert response.json() == {"answer": 42}
    (prompt,) = server.prompts
    assert (prompt.system, prompt.chunks, prompt.question) == ("", ("one\n\n", "two\n\n"), "why?")
    assert prompt.ticket.chunk_ids == ("d1", None)
    assert prompt.ticket.options == CacheOptions("auto", PositionStrategy.PARALLEL, namespace="n", explain=True)
    body = json.loads(server.bodies[0])
    assert body.keys() == {"model", "messages", "temperature"}
    assert server.headers[0]["content-length"] == str(len(server.bodies[0]))
    assert not server.marks.are_in(body["messages"][0]["content"])  # they expire with their request


@pytest.mark.parametrize(
    ("separator", "spelled"),
    [
        ("§", "§"),
        ("§", r"\u00a7"),
        ("é", r"\u00E9"),  # .NET's and Java's escapes are upper case
        ("\n--\n", r"\n--\n"),
        ('"|"', r"\"|\""),
        ("<|chunk|>", r"\u003c|chunk|\u003e"),  # Go's encoding/json escapes <, > and &
        ("/", "/"),
        ("/", r"\/"),  # PHP's json_encode
    ],
)
async def test_a_separator_is_found_however_a_language_spells_it(separator, spelled):
    server = Server(chunk_separator=separator)
    await server.post(CHAT, f'{{"messages": [{{"role": "user", "content": "one{spelled}why?"}}]}}'.encode())
    assert [prompt.chunks for prompt in server.prompts] == [("one\n\n",)]


@pytest.mark.parametrize(
    ("path", "body", "parameter", "message"),
    [
        (CHAT, {"documents": ["one", ""]}, "documents.1", "a document's text is empty"),
        (CHAT, {"cache": {"mode": "x"}}, "cache.mode", "Input should be 'auto', 'chunked' or 'full'"),
        (CHAT, {"cache": 5}, "cache", "Input should be a valid dictionary or instance of CacheField"),
        (CHAT, {"documents": [], "echo": True}, "echo", "echo can't be combined with documents"),
        ("/v1/responses", {"input": "x", "documents": [], "store": True}, "store", "store can't be combined"),
        ("/v1/completions", {"prompt": "x", "documents": []}, "documents", "documents need a chat endpoint"),
    ],
)
async def test_errors_have_openais_shape(path, body, parameter, message):
    server = Server()
    response = await server.post(path, {"messages": [USER]} | body)
    error = response.json()["error"]
    assert response.status_code == 400
    assert (error["type"], error["param"], error["code"]) == ("BadRequestError", parameter, 400)
    assert error["message"].startswith(message)
    assert error.keys() == {"message", "type", "param", "code", "reason"}
    assert server.bodies == []


async def test_a_streams_last_event_has_the_report():
    server = Server()
    response = await server.post(CHAT, DOCUMENTS | {"stream": True})
    first, last, done, rest = response.text.split("\n\n")
    assert [f"{first}\n\n", f"{done}\n\n"] == [server.events[0], server.events[2]]
    assert rest == ""
    expected = {**LAST, "kv_transfer_params": {"cache": make_report().to_dict()}}
    assert json.loads(last.removeprefix("data: ")) == expected


@pytest.mark.parametrize("headers", [{"content-type": "application/json"}, {"content-encoding": "gzip"}])
async def test_what_is_no_readable_stream_passes_as_it_is(headers):
    server = Server()
    server.stream_headers = headers
    server.events = [b'\x1f\x8b\xff\n\ndata: {"id": 5}\n\n', b"data: [DONE]\n\n", b"\xe6"]
    body = json.dumps(DOCUMENTS | {"stream": True}).encode()
    _, *sent = await call(server, {"type": "http.request", "body": body}, {"type": "http.disconnect"})
    assert b"".join(message["body"] for message in sent) == b"".join(server.events)


async def call(server: Server, *messages: dict) -> list[dict]:
    """Response to a client that sends ``messages``."""
    sent, pending = [], list(messages)

    async def receive():
        return pending.pop(0)

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": CHAT, "headers": [], "query_string": b"", "http_version": "1.1"}
    await server.app(scope, receive, send)
    assert not pending
    return sent


async def test_a_client_that_leaves_before_its_body_ends_reaches_nobody():
    server = Server()
    part = {"type": "http.request", "body": b'{"documents": ["one"', "more_body": True}
    assert await call(server, part, {"type": "http.disconnect"}) == []
    assert server.bodies == []


async def test_a_body_in_parts_is_read_whole():
    server = Server()
    body = json.dumps(DOCUMENTS).encode()
    parts = [{"type": "http.request", "body": body[i : i + 7], "more_body": True} for i in range(0, len(body), 7)]
    start, *_ = await call(server, *parts, {"type": "http.request"})
    assert start["status"] == 200
    assert server.prompts[0].chunks == ("one\n\n", "two\n\n")


async def test_the_endpoint_learns_of_a_disconnect_after_the_body():
    server, heard = Server(), []

    async def endpoint(scope, receive, send):
        heard.extend([await receive(), await receive()])

    server.app = DocumentsMiddleware(endpoint, make_context())
    body = {"type": "http.request", "body": b'{"cache": null}', "more_body": False}
    await call(server, body, {"type": "http.disconnect"})
    assert heard == [body, {"type": "http.disconnect"}]


class Recorder(Server):
    """Accepts any body."""

    async def answer(self, request: Request):
        self.bodies.append(await request.body())
        return JSONResponse({})


@given(st.sampled_from(PATHS), bodies, st.sampled_from([{}, {"chunk_separator": "##"}]))
def test_any_body_is_refused_in_words_or_goes_on_without_our_fields(path, body, settings):
    server = Recorder(**settings)
    response = asyncio.run(server.post(path, body))
    if response.status_code == 400:
        error = response.json()["error"]
        assert (error["type"], error["code"]) == ("BadRequestError", 400)
        assert error["message"]
        assert error["param"]
        assert server.bodies == []
    else:
        assert response.status_code == 200
        sent = json.loads(server.bodies[0])
        ours = {"documents", "cache", "store", "messages", "input", "prompt"}
        assert repr({**body, **sent}) == repr({**body, **{name: sent[name] for name in ours & sent.keys()}})
        assert sent == {} or "[tessera-" not in repr(sent) or not sent.get("documents")


@pytest.mark.parametrize("path", PATHS)
def test_what_is_nested_too_deeply_is_refused_or_left_to_vllm(path):
    statuses = set()
    for depth in range(150, 250):
        server = Recorder()
        nested = "[" * depth + "]" * depth
        body = f'{{"cache": {{}}, "input": "a", "messages": [{json.dumps(USER)}], "prompt": "a", "x": {nested}}}'
        statuses.add(asyncio.run(server.post(path, body.encode())).status_code)
    assert statuses <= {200, 400}


class Failing:
    """A fake vLLM that fails in some way, before or after it has asked the engine."""

    def __init__(self, how: str, *, asks: bool = False, errored: bool = False) -> None:
        self._how, self._asks = how, asks
        checked = Middleware(CheckedFieldsMiddleware, engine=SimpleNamespace(errored=errored))
        routes = [Route(path, self.answer, methods=["POST"]) for path in [*PATHS, "/sleep"]]
        self.app = Starlette(routes=routes, middleware=[checked])

    async def answer(self, _: Request) -> Response:
        progress = PROGRESS.get()
        if self._asks and progress is not None:
            progress.is_servers = True
        if self._how == "raises":
            raise AttributeError("no attribute 'text'")
        if self._how == "ours":
            unpack(None)
        error = {"message": "no attribute 'text'", "type": "InternalServerError", "param": None, "code": 500}
        return JSONResponse({"error": error}, 500)

    async def post(self, path: str) -> httpx.Response:
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await client.post(path, json={"input": "x"})


@pytest.mark.parametrize("how", ["raises", "answers"])
async def test_what_vllm_fails_at_before_it_asks_the_engine_is_the_requests_fault(how, caplog):
    for path in PATHS:
        response = await Failing(how).post(path)
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["reason"]) == (400, 400, "bad_request")
        assert "vLLM can't process this request: " in error["message"]
        assert error["message"].endswith("no attribute 'text'")
    assert how == "answers" or "before it asked the engine" in caplog.text


@pytest.mark.parametrize("how", ["raises", "answers"])
async def test_other_failures_are_the_servers(how):
    assert (await Failing(how).post("/sleep")).status_code == 500
    for failing in (Failing(how, asks=True), Failing(how, errored=True)):
        assert (await failing.post(CHAT)).status_code == 500


@pytest.mark.parametrize(
    ("part", "why"),
    [
        ({"type": "document", "source": {"data": "A" * (1 << 17)}}, "has another form than vLLM takes"),
        ({"type": "image_url", "image_url": {"url": "A" * (1 << 17)}}, "vLLM can't process this request"),
    ],
)
async def test_a_long_part_that_vllm_does_not_know_is_refused_before_an_error_quotes_it(part, why):
    async with client_of(Failing("answers").app) as client:
        answer = await client.post(CHAT, json={"messages": [{"role": "user", "content": [part]}]})
    assert answer.status_code == 400
    assert why in answer.json()["error"]["message"]


@pytest.mark.parametrize(("size", "status"), [(1000, 404), (5 << 20, 400)])
async def test_invocations_are_shorter(size, status):
    """vLLM's endpoint writes and reads its body once more in one turn of the event loop."""
    async with client_of(Failing("answers").app) as client:
        assert (await client.post("/invocations", json={"input": "x" * size})).status_code == status


async def test_a_defect_of_ours_is_no_fault_of_a_request():
    """vLLM answers 400 to errors of some builtin types."""
    assert (await Failing("ours").post(CHAT)).status_code == 500

    async def vllms(_: Request, error: Exception) -> Response:
        return JSONResponse({"message": str(error)}, 400)

    app = FastAPI(exception_handlers={TypeError: vllms, ValueError: vllms})
    answer_errors(app)

    @app.post("/ours")
    async def ours() -> None:
        unpack(None)

    @app.post("/vllms")
    async def of_vllm() -> None:
        int("a")

    @app.post("/unsupported")
    async def unsupported() -> None:
        raise NotImplementedError("not for this model")

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
        answer = await client.post("/ours")
        assert (answer.status_code, answer.json()["error"]["reason"]) == (500, "internal_error")
        assert (await client.post("/vllms")).status_code == 400
        answer = await client.post("/unsupported")
        assert (answer.status_code, answer.json()["error"]["reason"]) == (400, "not_implemented")
