# SPDX-License-Identifier: Apache-2.0
"""Sends many requests, a fixed number at once."""

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from statistics import median

from measuring.kit.client import Answer
from measuring.kit.workers import work_through
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
        medians = {name: median(getattr(answer, name) for answer in self.answers) for name in names}
        return {**medians, "requests_per_s": len(self.answers) / self.seconds}


async def closed_loop(ask: Ask, queries: Sequence[Query], concurrency: int) -> Outcome:
    """Runs ``concurrency`` clients, each sending its next query after an answer."""
    answers: dict[int, Answer] = {}

    async def send(number: int) -> None:
        answers[number] = await ask(queries[number])

    started = time.perf_counter()
    await work_through(range(len(queries)), send, concurrency)
    seconds = time.perf_counter() - started
    return Outcome([answers[number] for number in sorted(answers)], seconds)
