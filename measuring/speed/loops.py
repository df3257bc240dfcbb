# SPDX-License-Identifier: Apache-2.0
"""Two ways to send many requests: a fixed number at once, or each at its time."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from measuring.kit.client import Answer
from measuring.kit.statistics import median
from measuring.speed.query import Query

Result = TypeVar("Result")
Ask = Callable[[Query], Awaitable[Answer]]
"""Sends one query; raises :class:`measuring.kit.client.ServerError`."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """All answers, in the order of the queries, and the seconds from the first sending to the last answer."""

    answers: list[Answer]
    seconds: float

    @property
    def requests_per_s(self) -> float:
        return len(self.answers) / self.seconds

    def median(self, value: Literal["ttft_s", "latency_s"]) -> float:
        """Of all answers."""
        return median([getattr(answer, value) for answer in self.answers])


async def closed_loop(ask: Ask, queries: Sequence[Query], concurrency: int) -> Outcome:
    """As many clients as ``concurrency`` says, each sending a next query as soon as its last one is answered.

    Raises :class:`measuring.kit.client.ServerError`.
    """
    pending = iter(enumerate(queries))

    async def client() -> list[tuple[int, Answer]]:
        return [(number, await ask(query)) for number, query in pending]

    started = time.perf_counter()
    answers = [answer for answered in await _all(client() for _ in range(concurrency)) for answer in answered]
    seconds = time.perf_counter() - started
    return Outcome([answer for _, answer in sorted(answers, key=lambda numbered: numbered[0])], seconds)


async def open_loop(ask: Ask, queries: Sequence[Query], at_s: Sequence[float]) -> Outcome:
    """Each query is sent ``at_s`` seconds after the start, however many are still unanswered.

    Raises :class:`measuring.kit.client.ServerError`.
    """
    started = time.perf_counter()

    async def client(query: Query, at: float) -> Answer:
        await asyncio.sleep(at - (time.perf_counter() - started))
        return await ask(query)

    answers = await _all(client(query, at) for query, at in zip(queries, at_s, strict=True))
    return Outcome(answers, time.perf_counter() - started - at_s[0])


async def _all(work: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """The results of all; the first error ends the others, and is raised itself."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in work]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]
