# SPDX-License-Identifier: Apache-2.0
"""Requests cancelled by a stopping server, and requests of a dead engine."""

import asyncio
import json
from contextlib import contextmanager

import pytest

from app.http.cut_off import CutOffMiddleware


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


async def answered(app, kind="http", method="POST", engine=None):
    """ASGI messages of the response of ``app`` before ``engine``, by default a sound one."""
    sent = []

    async def send(message):
        sent.append(message)

    await CutOffMiddleware(app, engine or FakeEngine())({"type": kind, "method": method}, None, send)
    return sent


async def cancelled(app, kind="http"):
    """ASGI messages of a request to ``app`` that is cancelled while it waits."""
    task = asyncio.create_task(answered(app, kind))
    await asyncio.sleep(0)
    task.cancel()
    return await task


async def waits(scope, receive, send):
    await asyncio.Event().wait()


async def streams(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await asyncio.Event().wait()


def test_one_without_an_answer_gets_a_503():
    start, body = asyncio.run(cancelled(waits))
    assert start["status"] == 503
    assert b"The server is stopping." in body["body"]


def test_a_stream_is_not_ended_as_if_it_were_whole():
    (start,) = asyncio.run(cancelled(streams))
    assert start["status"] == 200


def test_what_is_not_a_request_is_cancelled():
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancelled(waits, "lifespan"))


async def fails_amid_its_stream(scope, receive, send):
    headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"data: {}\n\n", "more_body": True})
    raise ValueError("a secret")


def test_a_stream_that_fails_says_so_in_its_last_event():
    *_, last = asyncio.run(answered(fails_amid_its_stream))
    name, data = last["body"].decode().strip().split("\n")
    assert (name, last.get("more_body", False)) == ("event: error", False)
    said = json.loads(data.removeprefix("data: "))
    assert said["error"]["reason"] == "internal_error"
    assert "secret" not in data


async def fails_after_its_stream(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
    await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})
    raise ValueError("a defect")


async def fails_amid_compressed_bytes(scope, receive, send):
    headers = [(b"content-type", b"text/event-stream"), (b"content-encoding", b"gzip")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    raise ValueError("a defect")


@pytest.mark.parametrize("app", [fails_after_its_stream, fails_amid_compressed_bytes])
def test_nothing_is_written_where_no_event_may_follow(app):
    with pytest.raises(ValueError, match="a defect"):
        asyncio.run(answered(app))


async def answers(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})


async def fails(scope, receive, send):
    raise RuntimeError("cannot schedule new futures after shutdown")


def test_one_that_comes_when_the_engine_has_stopped_gets_a_503():
    start, body = asyncio.run(answered(answers, engine=FakeEngine(is_stopping=True)))
    assert start["status"] == 503
    assert b"The server is stopping." in body["body"]


def test_health_and_metrics_are_served_to_the_end():
    (start,) = asyncio.run(answered(answers, method="GET", engine=FakeEngine(is_stopping=True)))
    assert start["status"] == 200


def test_one_that_fails_because_the_engine_has_stopped_gets_a_503():
    engine = FakeEngine()

    async def stops(scope, receive, send):
        engine.is_stopping = True
        await fails(scope, receive, send)

    start, _ = asyncio.run(answered(stops, engine=engine))
    assert start["status"] == 503


def test_an_error_that_vllm_made_of_the_engines_end_becomes_a_503():
    engine = FakeEngine()

    async def stops(scope, receive, send):
        engine.is_stopping = True
        await send({"type": "http.response.start", "status": 500, "headers": []})
        await send({"type": "http.response.body", "body": b"EngineCore encountered an issue"})

    start, body = asyncio.run(answered(stops, engine=engine))
    assert start["status"] == 503
    assert b"The server is stopping." in body["body"]


def test_other_failures_are_passed_on():
    with pytest.raises(RuntimeError):
        asyncio.run(answered(fails))


@pytest.mark.parametrize("method", ["POST", "GET"])
def test_an_engine_that_has_died_is_told_of(method):
    async def ill(scope, receive, send):
        await send({"type": "http.response.start", "status": 503, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    start, body = asyncio.run(answered(ill, method=method, engine=FakeEngine(has_died=True)))
    assert start["status"] == 503
    assert b"The engine has died; the server ends." in body["body"]


def test_what_a_stopping_server_waits_for_is_counted():
    engine = FakeEngine()

    async def counts(scope, receive, send):
        assert engine.num_answering == 1
        await answered(answers, method="GET", engine=engine)
        raise RuntimeError

    with pytest.raises(RuntimeError):
        asyncio.run(answered(counts, engine=engine))
    assert engine.num_answering == 0
