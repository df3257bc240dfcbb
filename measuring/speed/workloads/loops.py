# SPDX-License-Identifier: Apache-2.0
"""Sends many requests, a fixed number at once."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from measuring.kit.client import Answer
from measuring.kit.statistics import median
from measuring.speed.query import Query
from measuring.speed.samples import Value

Ask = Callable[[Query], Awaitable[Answer]]
"""Sends one query; raises :class:`measuring.kit.client.ServerError`."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Answers in the order of the queries, and seconds until the last answer."""

    answers: list[Answer]
    seconds: float

    @property
    def values(self) -> dict[Value, float]:
        """Medians over all answers, and the throughput."""
        names: tuple[Value, ...] = ("ttft_s", "tpot_s", "latency_s")
        medians = {name: median([getattr(answer, name) for answer in self.answers]) for name in names}
        return {**medians, "requests_per_s": len(self.answers) / self.seconds}


async def closed_loop(ask: Ask, queries: Sequence[Query], concurrency: int) -> Outcome:
    """Runs ``concurrency`` clients, each sending its next query after an answer.

    The first :class:`measuring.kit.client.ServerError` ends them all, and is raised.
    """
    pending = iter(enumerate(queries))
    answers: dict[int, Answer] = {}

    async def client() -> None:
        for number, query in pending:
            answers[number] = await ask(query)

    started = time.perf_counter()
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(client())
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    seconds = time.perf_counter() - started
    return Outcome([answers[number] for number in sorted(answers)], seconds)
