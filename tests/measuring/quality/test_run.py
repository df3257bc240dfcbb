# SPDX-License-Identifier: Apache-2.0
"""Questions × modes: their order, their concurrency, and the end of a run."""

import asyncio
import threading

import pytest

from measuring.kit.client import ServerError, SetupError
from measuring.quality.client import AskOptions, TesseraClient
from measuring.quality.metrics import REFUSAL
from measuring.quality.results import Result
from measuring.quality.run import ask_all, jobs
from tests.measuring.quality.helpers import TEMPLATE_ERROR, Reply, asked_mode, make_question, make_report

MODES = ("full", "shared", "offset")
QUESTIONS = [make_question(name, name) for name in "abcd"]


@pytest.fixture
def run(server):
    """Asks all questions in all modes; returns the kept results, or the error."""

    async def run(concurrency=1, keep=None, pending=None) -> list[Result]:
        results = []
        async with TesseraClient(server.url) as client:
            given = pending or jobs(QUESTIONS, MODES, set())
            await ask_all(given, client, AskOptions("m", 32, REFUSAL), keep or results.append, concurrency)
        return results

    return run


def order(answered=frozenset(), modes=MODES) -> list[str]:
    return [f"{question.id} {mode}" for question, mode in jobs(QUESTIONS, modes, answered)]


def test_modes_take_turns_at_being_first():
    assert order() == [
        *("a full", "a shared", "a offset"),
        *("b shared", "b offset", "b full"),
        *("c offset", "c full", "c shared"),
        *("d full", "d shared", "d offset"),
    ]
    assert order(modes=("offset",)) == ["a offset", "b offset", "c offset", "d offset"]


def test_what_is_answered_is_left_out_without_changing_the_order():
    answered = {("a", "full"), ("b", "shared"), ("b", "offset")}
    assert order(answered) == [name for name in order() if tuple(name.split()) not in answered]


async def test_one_request_at_a_time_in_order(server, run):
    results = await run()
    assert server.asked() == [tuple(name.split()) for name in order()]
    assert [f"{result.question} {result.mode}" for result in results] == order()
    assert all(result.ran_as == result.mode for result in results)


@pytest.mark.parametrize("concurrency", [2, 5])
async def test_so_many_at_a_time_and_no_more(server, run, concurrency):
    # Passed by so many requests together, or not at all; a further one would be counted before it could wait.
    barrier = threading.Barrier(concurrency)
    running, most, lock = 0, 0, threading.Lock()

    def hold():
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        barrier.wait(60)
        with lock:
            running -= 1

    server.reply = lambda body: Reply("x", make_report(asked_mode(body)), before=hold)
    pending = iter([(make_question(str(i)), "full") for i in range(2 * concurrency)])
    assert len(await run(concurrency, pending=pending)) == 2 * concurrency
    assert most == concurrency


async def test_a_refused_request_is_a_result(server, run):
    error = {"message": "too long", "type": "x", "code": 400}
    server.reply = lambda body: Reply(
        "x", make_report(asked_mode(body)), error=error if body["chunks"][0]["text"] == "b" else None
    )
    results = await run()
    assert len(results) == 12
    assert {(result.question, result.error) for result in results if result.error} == {("b", "too long")}


@pytest.mark.parametrize(("message", "kind"), [("engine died", ServerError), (TEMPLATE_ERROR, SetupError)])
@pytest.mark.parametrize("concurrency", [1, 3])
async def test_a_failing_server_ends_the_run(server, run, message, kind, concurrency):
    kept = []

    def keep(result):
        kept.append(result)
        server.refuse_as_vllm(500, message)

    with pytest.raises(kind, match=message):
        await run(concurrency, keep)
    assert 1 <= len(kept) <= concurrency


async def test_a_cancelled_run_asks_no_more(server, run):
    held, released = threading.Event(), threading.Event()

    def hold():
        held.set()
        released.wait(60)

    server.reply = lambda body: Reply("x", make_report(asked_mode(body)), before=hold)
    task = asyncio.create_task(run())
    await asyncio.to_thread(held.wait, 60)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    released.set()
    assert len(server.requests) == 1
