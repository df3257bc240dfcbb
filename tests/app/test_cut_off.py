# SPDX-License-Identifier: Apache-2.0
"""Requests that a stopping server cancels."""

import asyncio

import pytest

from app.cut_off import CutOffMiddleware


async def cancelled(app, kind="http"):
    """The messages that a request to ``app`` has sent, cancelled while it waits."""
    sent = []

    async def send(message):
        sent.append(message)

    task = asyncio.create_task(CutOffMiddleware(app)({"type": kind}, None, send))
    await asyncio.sleep(0)
    task.cancel()
    await task
    return sent


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
