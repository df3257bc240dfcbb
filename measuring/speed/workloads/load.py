# SPDX-License-Identifier: Apache-2.0
"""Many users at once, over a set of chunks of which some are popular."""

import itertools
import math
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from measuring.kit.texts import Texts
from measuring.speed.answers import Asked, DifferentAnswerError, check_report, check_same
from measuring.speed.loops import Ask, Outcome, closed_loop, open_loop
from measuring.speed.pool import Pool, pool_of
from measuring.speed.rag import BenchmarkError, Query
from measuring.speed.samples import Claim, Ratio, Sample, System, Value
from measuring.speed.servers import STOCK, TESSERA, Servers
from measuring.speed.statistics import median
from measuring.speed.systems import Server
from measuring.speed.traces import Trace, zipf_trace
from measuring.speed.workloads.base import Options, Record, Step

TRACE_FILE = "trace.jsonl"
"""In the run's folder: `--trace` with it repeats the requests."""
_QUARTER = "quarter"
_NAMESPACE = "load"
_SYSTEM_TOKENS, _CHUNK_TOKENS, _QUESTION_TOKENS, _OUTPUT_TOKENS = 64, 256, 32, 16
_CONCURRENCY = 8
"""Of the warm-up, and of the rounds from which the open loop's rate is taken."""
_RATE_SHARE = 0.7
"""The open loop's rate as a share of what stock vLLM reached: as much as it bears without an ever longer queue."""
_CHECKED_ANSWERS = 3
"""Of each round; comparing costs time only where answers differ, but then much."""
_OPEN_LOOP = "open loop"

_Loop = Callable[[Ask, Sequence[Query]], Awaitable[Outcome]]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Chunks to choose from, rounds by concurrency, rounds of the open loop, and requests of each round."""

    chunks: int
    rounds: dict[int, int]
    open_rounds: int
    requests: int

    @property
    def all_requests(self) -> int:
        """The warm-up included."""
        return self.requests * (1 + sum(self.rounds.values()) + self.open_rounds)


class Load:
    """Throughput and times of stock vLLM, of Tessera with all chunks cached, and with a pool for a quarter of them.

    A trace that is shorter than the run starts over. Its times of arrival are those of the open loop; without them,
    arrivals are random (Poisson) at a rate that stock vLLM can serve.
    """

    name = "load"
    title = "many users at once, popular chunks and others"
    axis = "load"
    # Not fewer chunks: a quarter of them must take what eight requests hold at once.
    short = Sizes(170, {8: 1}, open_rounds=0, requests=8)
    # First what is claimed: an interrupted run then has it.
    long = Sizes(200, {8: 10, 4: 5, 1: 5}, open_rounds=5, requests=24)

    def __init__(self, options: Options) -> None:
        self._sizes = self.long if options.is_long else self.short
        seed = options.trace.seed if options.trace else options.seed
        generated = zipf_trace(seed, self._sizes.chunks, _CHUNK_TOKENS, self._sizes.all_requests)
        self._trace = options.trace or generated
        self._is_generated = self._trace == generated  # also when it has been written and read
        self._output = options.output
        # All that is random has the trace's seed: so its file repeats the run.
        self._texts = Texts(f"{self.name} {self._trace.seed}", options.characters_per_token)
        self._system = self._texts.text(_SYSTEM_TOKENS)
        self._chunks = [self._texts.chunk(tokens) for tokens in self._trace.chunk_tokens]
        self._arrivals = itertools.cycle(zip(self._trace.requests, _gaps(self._trace), strict=False))

    def claims(self) -> list[Claim]:
        """The bounds are for the generated requests; of others, only ratios are reported."""
        five, two = (5, 2) if self._is_generated else (None, None)
        point = _point(_CONCURRENCY)
        claims: list[Claim] = [
            Ratio(self.name, point, "requests_per_s", "warm", "stock", at_least=five),
            Ratio(self.name, point, "requests_per_s", "quarter", "stock", at_least=two),
        ]
        if self._sizes.open_rounds:
            claims.append(Ratio(self.name, _OPEN_LOOP, "ttft_s", "stock", "warm"))
        return claims

    def sizes(self) -> dict[str, Any]:
        return {
            "trace": self._trace.name,
            "trace_seed": self._trace.seed,
            "system_tokens": _SYSTEM_TOKENS,
            "chunks": len(self._chunk_set()),
            "chunk_tokens": median([self._trace.chunk_tokens[chunk] for chunk in self._chunk_set()]),
            "question_tokens": _QUESTION_TOKENS,
            "output_tokens": _OUTPUT_TOKENS,
            "rounds": {_point(concurrency): rounds for concurrency, rounds in self._sizes.rounds.items()},
            "open_loop_rounds": self._sizes.open_rounds,
            "requests_per_round": self._sizes.requests,
        }

    def num_steps(self) -> int:
        return 2 + 3 * sum(self._sizes.rounds.values()) + 2 * self._sizes.open_rounds

    async def run(self, servers: Servers, record: Record, step: Step) -> None:
        self._trace.write(self._output / TRACE_FILE)
        systems = await self._start(servers)
        step()
        await self._warm_up(systems)
        step()
        rates = await self._closed(systems, record, step)
        await servers.close(_QUARTER)
        del systems["quarter"]
        await self._open(systems, record, step, rates)
        await systems["warm"].clear(_NAMESPACE)

    async def _start(self, servers: Servers) -> dict[System, Server]:
        """The servers, all chunks cached in one, and the other's pool a quarter of what they take there."""
        tessera = await servers.get(TESSERA)
        before = await pool_of(tessera)
        self._check_fits(before)
        chunks = tuple(self._chunks[chunk] for chunk in self._chunk_set())
        await tessera.ingest(Query(self._system, chunks, "", _OUTPUT_TOKENS), _NAMESPACE)
        pages = math.ceil((before.free - (await pool_of(tessera)).free) / 4)
        quarter = await servers.get(_QUARTER, "--chunk-cache-memory", str(pages * before.page_bytes))
        if (held := (await pool_of(quarter)).pages) != pages:
            raise BenchmarkError(f"{quarter.name}: the pool has {held} pages; a quarter of the chunks takes {pages}")
        return {"stock": await servers.get(STOCK), "warm": tessera, "quarter": quarter}

    def _chunk_set(self) -> list[int]:
        """All that was generated; of another trace, what its requests are about: it may come with more."""
        requested = set(itertools.chain.from_iterable(self._trace.requests[: self._sizes.all_requests]))
        return list(range(self._sizes.chunks)) if self._is_generated else sorted(requested)

    def _check_fits(self, pool: Pool) -> None:
        pages = sum(pool.pages_for(self._trace.chunk_tokens[chunk]) for chunk in self._chunk_set())
        if pages > pool.free:
            raise BenchmarkError(
                f"the chunks of {self.name} take {pages} pages, and Tessera's pool has {pool.free} left: "
                "raise TESSERA_CHUNK_CACHE_MEMORY"
            )

    async def _warm_up(self, systems: dict[System, Server]) -> None:
        """Brings the small pool into the state in which it stays, and the others once through all of their code."""
        queries, _ = self._next_requests()
        for system, server in systems.items():
            asked = queries if system == "quarter" else queries[:1]
            await closed_loop(partial(server.ask, namespace=_NAMESPACE), asked, _CONCURRENCY)
            await server.settle()

    async def _closed(self, systems: dict[System, Server], record: Record, step: Step) -> list[float]:
        """Stock vLLM's requests per second at the concurrency on which the open loop's rate rests."""
        rates = []
        for concurrency, rounds in self._sizes.rounds.items():
            loop = partial(closed_loop, concurrency=concurrency)
            for number in range(rounds):
                outcomes = await self._round(systems, number, self._next_requests()[0], loop, step)
                for system, outcome in outcomes.items():
                    record(self._sample(_point(concurrency), system, number, _values(outcome)))
                if concurrency == _CONCURRENCY:
                    rates.append(outcomes["stock"].requests_per_s)
        return rates

    async def _open(self, systems: dict[System, Server], record: Record, step: Step, rates: list[float]) -> None:
        slower = 1.0 if self._trace.at_s else 1 / (_RATE_SHARE * median(rates))
        for number in range(self._sizes.open_rounds):
            queries, gaps = self._next_requests()
            loop = partial(open_loop, at_s=[slower * at for at in itertools.accumulate([0.0, *gaps[1:]])])
            for system, outcome in (await self._round(systems, number, queries, loop, step)).items():
                record(self._sample(_OPEN_LOOP, system, number, {"ttft_s": outcome.median("ttft_s")}))

    async def _round(
        self, systems: dict[System, Server], number: int, queries: list[Query], loop: _Loop, step: Step
    ) -> dict[System, Outcome]:
        """The same queries to each system, one system after the other; each round begins with another."""
        first = number % len(systems)
        outcomes: dict[System, Outcome] = {}
        for system in [*systems][first:] + [*systems][:first]:
            outcomes[system] = await loop(partial(systems[system].ask, namespace=_NAMESPACE), queries)
            await systems[system].settle()
            step()
        await _check(systems, queries, outcomes)
        return outcomes

    def _next_requests(self) -> tuple[list[Query], list[float]]:
        """The queries of a round, each with a new question, and the time from the arrival before to its own."""
        requests, gaps = zip(*itertools.islice(self._arrivals, self._sizes.requests), strict=True)
        return [self._query(request) for request in requests], list(gaps)

    def _query(self, request: tuple[int, ...]) -> Query:
        chunks = tuple(self._chunks[chunk] for chunk in request)
        return Query(self._system, chunks, self._texts.text(_QUESTION_TOKENS), _OUTPUT_TOKENS)

    def _sample(self, point: str, system: System, number: int, values: dict[Value, float]) -> Sample:
        return Sample(workload=self.name, point=point, system=system, round=number, values=values)


async def _check(systems: dict[System, Server], queries: list[Query], outcomes: dict[System, Outcome]) -> None:
    """Raises :class:`DifferentAnswerError` unless Tessera reused chunks, and answers don't depend on its pool."""
    for answer in outcomes["warm"].answers:
        check_report(answer, "hit")
    if "quarter" not in outcomes:
        return
    for answer in outcomes["quarter"].answers:
        if answer.report.get("mode") != "chunked":
            raise DifferentAnswerError(f"quarter: a request ran as {answer.report.get('mode')}; not reporting")
    for i, query in enumerate(queries[:_CHECKED_ANSWERS]):
        warm, quarter = (
            Asked(systems[system], outcomes[system].answers[i], _NAMESPACE) for system in ("warm", "quarter")
        )
        await check_same(query, warm, quarter)


def _gaps(trace: Trace) -> Iterator[float]:
    """Seconds from each arrival to the next, or, if the trace has no times, random ones of 1 on average."""
    if trace.at_s:
        return (at - before for before, at in itertools.pairwise((trace.at_s[0], *trace.at_s)))
    source = random.Random(f"arrivals {trace.seed}")
    return (source.expovariate(1) for _ in trace.requests)


def _values(outcome: Outcome) -> dict[Value, float]:
    return {
        "requests_per_s": outcome.requests_per_s,
        "ttft_s": outcome.median("ttft_s"),
        "latency_s": outcome.median("latency_s"),
    }


def _point(concurrency: int) -> str:
    return f"concurrency {concurrency}"
