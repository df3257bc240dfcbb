# SPDX-License-Identifier: Apache-2.0
"""Requests cancelled by a stopping server, and requests of a dead engine."""

import asyncio
import json
from contextlib import contextmanager
from http import HTTPStatus

import pytest
from starlette.responses import Response
from vllm.exceptions import VLLMValidationError

from app.http.cut_off import CutOffMiddleware
from app.http.openapi import JsonLines
from engine_ext.wire.vllm_compat import GracefulHTTPError

EVENTS = {"content-type": "text/event-stream; charset=utf-8"}


class FakeEngine:
    num_answering = 0

    def __init__(self, *, is_stopping=False, has_died=False):
        self.is_stopping, self.has_died = is_stopping, has_died

    @contextmanager
    def answering(self):
        self.num_answering += 1
        try:
            yield
        finally:
            self.num_answering -= 1


async def answered(app, engine=None, *, kind="http", method="POST", is_cancelled=False):
    """ASGI messages of the response of ``app`` before ``engine``, by default a sound one; cancelled while it waits."""
    sent = []

    async def send(message):
        sent.append(message)

    guarded = CutOffMiddleware(app, engine or FakeEngine())
    answering = asyncio.create_task(guarded({"type": kind, "method": method}, asyncio.Event().wait, send))
    await asyncio.sleep(0.01)
    if is_cancelled:
        answering.cancel()
    await answering
    return sent


def is_refused(sent, words="The server is stopping."):
    start, body = sent
    return start["status"] == 503 and words.encode() in body["body"]


async def waits(scope, receive, send):
    await asyncio.Event().wait()


async def fails(scope, receive, send):
    raise RuntimeError("cannot schedule new futures after shutdown")


def begins(then, headers=EVENTS):
    """An app that begins its answer."""

    async def app(scope, receive, send):
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": raw})
        await then(scope, receive, send)

    return app


async def lines(number):
    for each in range(number):
        yield json.dumps({"line": each}) + "\n"
    await asyncio.Event().wait()


async def test_one_without_an_answer_gets_a_503_and_one_that_has_begun_is_not_ended_as_if_it_were_whole():
    assert is_refused(await answered(waits, is_cancelled=True))
    (start,) = await answered(begins(waits), is_cancelled=True)
    assert start["status"] == 200
    # Lines that wait for the first are not begun.
    assert is_refused(await answered(JsonLines(lines(0)), is_cancelled=True))
    start, *sent = await answered(JsonLines(lines(2)), is_cancelled=True)
    assert (start["status"], [each["body"] for each in sent]) == (200, [b'{"line": 0}\n', b'{"line": 1}\n'])
    with pytest.raises(asyncio.CancelledError):
        await answered(waits, kind="lifespan", is_cancelled=True)


async def fails_amid_its_stream(scope, receive, send):
    await send({"type": "http.response.body", "body": b"data: {}\n\n", "more_body": True})
    raise ValueError("a secret")


async def fails_after_its_stream(scope, receive, send):
    await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})
    raise ValueError("a secret")


async def test_a_stream_that_fails_says_so_in_its_last_event():
    *_, last = await answered(begins(fails_amid_its_stream))
    name, data = last["body"].decode().strip().split("\n")
    assert (name, last.get("more_body", False)) == ("event: error", False)
    assert json.loads(data.removeprefix("data: "))["error"]["reason"] == "internal_error"
    assert "secret" not in data


def refused(error, *, by_starlette):
    """An app that refuses a request when its stream has begun; Starlette has an error of its own for that."""

    async def app(scope, receive, send):
        if by_starlette:
            raise RuntimeError("response already started") from error
        raise error

    return begins(app)


@pytest.mark.parametrize("by_starlette", [True, False])
@pytest.mark.parametrize(
    ("error", "code", "reason", "parameter"),
    [
        (GracefulHTTPError("no tokens are left", HTTPStatus.TOO_MANY_REQUESTS), 429, "limit_exceeded", None),
        (GracefulHTTPError("for peers", HTTPStatus.FORBIDDEN), 403, "peers_only", None),
        (GracefulHTTPError("a queue is full", HTTPStatus.SERVICE_UNAVAILABLE), 503, "not_now", None),
        (VLLMValidationError("no such regex", parameter="regex"), 400, "bad_request", "regex"),
    ],
)
async def test_a_stream_that_is_refused_when_it_has_begun_says_why(
    error, code, reason, parameter, by_starlette, caplog
):
    _, last = await answered(refused(error, by_starlette=by_starlette))
    name, data = last["body"].decode().strip().split("\n")
    said = json.loads(data.removeprefix("data: "))
    assert (name, said["type"], last.get("more_body", False)) == ("event: error", "error", False)
    assert said["error"]["message"] == str(error)
    assert [said["error"][each] for each in ("code", "reason", "param")] == [code, reason, parameter]
    assert not caplog.records


@pytest.mark.parametrize(
    "app",
    [begins(fails_after_its_stream), begins(fails_amid_its_stream, EVENTS | {"content-encoding": "gzip"}), fails],
    ids=["after its end", "compressed", "no stream"],
)
async def test_other_failures_are_passed_on(app):
    with pytest.raises((ValueError, RuntimeError), match=r"a secret|after shutdown"):
        await answered(app)


async def test_what_comes_when_the_engine_has_stopped_gets_a_503_but_health_and_metrics():
    engine = FakeEngine(is_stopping=True)
    assert is_refused(await answered(Response(), engine))
    start, _ = await answered(Response(), engine, method="GET")
    assert start["status"] == 200


@pytest.mark.parametrize("app", [fails, Response(b"EngineCore encountered an issue", 500)], ids=["raises", "answers"])
async def test_what_fails_because_the_engine_has_stopped_gets_a_503(app):
    engine = FakeEngine()

    async def stops(scope, receive, send):
        engine.is_stopping = True
        await app(scope, receive, send)

    assert is_refused(await answered(stops, engine))


@pytest.mark.parametrize("method", ["POST", "GET"])
async def test_an_engine_that_has_died_is_told_of(method):
    sent = await answered(Response(status_code=503), FakeEngine(has_died=True), method=method)
    assert is_refused(sent, "The engine has died; the server ends.")


async def test_what_a_stopping_server_waits_for_is_counted():
    engine = FakeEngine()

    async def counts(scope, receive, send):
        assert engine.num_answering == 1
        await answered(Response(), engine, method="GET")
        raise RuntimeError

    with pytest.raises(RuntimeError):
        await answered(counts, engine)
    assert engine.num_answering == 0
