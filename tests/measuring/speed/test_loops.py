# SPDX-License-Identifier: Apache-2.0
"""How many requests are under way at once."""

import asyncio

import pytest

from measuring.kit.client import Answer, ServerError
from measuring.speed.query import Query
from measuring.speed.workloads.loops import Outcome, closed_loop

QUERIES = [Query("", (), f"question {i}", 4) for i in range(8)]


async def test_a_closed_loop_has_so_many_requests_under_way():
    running, most = 0, 0
    enough = asyncio.Barrier(4)  # never passed by fewer

    async def ask(query):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await enough.wait()
        running -= 1
        return Answer(text=query.question)

    outcome = await closed_loop(ask, QUERIES, concurrency=4)
    assert most == 4
    assert sorted(answer.text for answer in outcome.answers) == sorted(query.question for query in QUERIES)


async def test_answers_are_in_the_order_of_the_queries():
    released = asyncio.Event()

    async def ask(query):
        if query is QUERIES[0]:
            await released.wait()
        if query is QUERIES[-1]:
            released.set()
        return Answer(text=query.question)

    outcome = await closed_loop(ask, QUERIES, concurrency=2)
    assert [answer.text for answer in outcome.answers] == [query.question for query in QUERIES]


async def test_the_first_error_ends_the_others():
    cancelled = []

    async def ask(query):
        if query is QUERIES[1]:
            raise ServerError("gone")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(query)
            raise

    with pytest.raises(ServerError, match="gone"):
        await closed_loop(ask, QUERIES, 4)
    assert QUERIES[0] in cancelled


def test_figures_of_a_round():
    answers = [Answer(ttft_s=ttft, latency_s=2 * ttft) for ttft in (0.1, 0.4, 0.2)]
    outcome = Outcome(answers, seconds=1.5)
    assert outcome.values["requests_per_s"] == 2
    assert (outcome.values["ttft_s"], outcome.values["latency_s"]) == (0.2, 0.4)
