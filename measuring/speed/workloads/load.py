# SPDX-License-Identifier: Apache-2.0
"""Many users at once, over a set of chunks of which some are popular."""

import itertools
import math
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, Final

from measuring.kit.client import ServerError
from measuring.kit.texts import Texts
from measuring.speed.answers import Asked, DifferentAnswerError, check_report, check_same
from measuring.speed.query import Query
from measuring.speed.samples import Claim, Ratio, Sample, System
from measuring.speed.servers import STOCK, TESSERA, Pool, Server, Servers
from measuring.speed.traces import zipf_trace
from measuring.speed.workloads.base import Options, Workload
from measuring.speed.workloads.loops import Outcome, closed_loop

TRACE_FILE = "trace.jsonl"
"""In the run's folder: `--trace` with it repeats the requests."""
_SERVERS: Final[dict[System, str]] = {"stock": STOCK, "warm": TESSERA, "quarter": "quarter"}
_NAMESPACE = "load"
_SYSTEM_TOKENS, _CHUNK_TOKENS, _QUESTION_TOKENS, _OUTPUT_TOKENS = 64, 256, 32, 16
_CONCURRENCY = 8
"""Requests at once in the warm-up, and in the round of which something is claimed."""
_CHECKED_ANSWERS = 3
"""Answers compared in each pass; comparing is slow where they differ."""
_TRACE_REQUESTS = 1000
"""Requests of a generated trace. Further rounds start it over, with other questions."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Chunks to choose from, numbers of requests at once, and requests of each pass."""

    chunks: int
    concurrencies: tuple[int, ...]
    requests: int


class Load(Workload):
    """Throughput and times: stock vLLM, Tessera with all chunks or a quarter cached.

    A trace that is shorter than the run starts over.
    """

    name = "load"
    title = "many users at once, popular chunks and others"
    axis = "load"
    # Not fewer chunks: a quarter of them must take what eight requests hold at once.
    short = Sizes(170, (8,), requests=8)
    long = Sizes(200, (8, 4, 1), requests=24)

    def __init__(self, options: Options) -> None:
        self._sizes = self.long if options.is_long else self.short
        seed = options.trace.seed if options.trace else options.seed
        generated = zipf_trace(seed, self._sizes.chunks, _CHUNK_TOKENS, _TRACE_REQUESTS)
        self._trace = options.trace or generated
        self._is_generated = self._trace == generated  # also when it has been written and read
        self._output = options.output
        # All that is random has the trace's seed: so its file repeats the run.
        self._texts = Texts(f"{self.name} {self._trace.seed}", options.characters_per_token)
        self._system = self._texts.text(_SYSTEM_TOKENS)
        self._chunks = [self._texts.chunk(tokens) for tokens in self._trace.chunk_tokens]
        self._requests = itertools.cycle(self._trace.requests)

    def claims(self) -> list[Claim]:
        """The bounds are for the generated requests; of others, only ratios are reported."""
        five, two = (5, 2) if self._is_generated else (None, None)
        point = _point(_CONCURRENCY)
        return [
            Ratio(self.name, point, "requests_per_s", "warm", "stock", at_least=five),
            Ratio(self.name, point, "requests_per_s", "quarter", "stock", at_least=two),
        ]

    def sizes(self) -> dict[str, Any]:
        return {
            "trace": self._trace.name,
            "trace_seed": self._trace.seed,
            "system_tokens": _SYSTEM_TOKENS,
            "chunks": len(self._chunk_set()),
            "chunk_tokens": median(self._trace.chunk_tokens[chunk] for chunk in self._chunk_set()),
            "question_tokens": _QUESTION_TOKENS,
            "output_tokens": _OUTPUT_TOKENS,
            "requests_per_round": self._sizes.requests,
        }

    async def prepare(self, servers: Servers) -> None:
        """Fills the pool of all chunks, and the quarter's to its steady state."""
        self._trace.write(self._output / TRACE_FILE)
        await self._start(servers)
        queries = self._next_queries()
        for system, name in _SERVERS.items():
            server, asked = await servers.get(name), queries if system == "quarter" else queries[:1]
            await closed_loop(partial(server.ask, namespace=_NAMESPACE), asked, _CONCURRENCY)
            await server.settle()

    async def round(self, servers: Servers, number: int) -> list[Sample]:
        systems = {system: await servers.get(name) for system, name in _SERVERS.items()}
        samples = []
        for concurrency in self._sizes.concurrencies:
            outcomes = await self._passes(systems, number, concurrency)
            for system, outcome in outcomes.items():
                point = _point(concurrency)
                samples.append(
                    Sample(workload=self.name, point=point, system=system, round=number, values=outcome.values)
                )
        return samples

    async def finish(self, servers: Servers) -> None:
        await servers.close(_SERVERS["quarter"])
        await (await servers.get(TESSERA)).clear(_NAMESPACE)

    async def _start(self, servers: Servers) -> None:
        """Caches all chunks, and starts a server with a pool for a quarter of them."""
        tessera = await servers.get(TESSERA)
        before = await tessera.pool()
        self._check_fits(before)
        chunks = tuple(self._chunks[chunk] for chunk in self._chunk_set())
        await tessera.ingest(Query(self._system, chunks, "", _OUTPUT_TOKENS), _NAMESPACE)
        pages = math.ceil((before.free - (await tessera.pool()).free) / 4)
        quarter = await servers.get(_SERVERS["quarter"], "--chunk-cache-memory", str(pages * before.page_bytes))
        if (held := (await quarter.pool()).pages) != pages:
            raise ServerError(f"{quarter.name}: the pool has {held} pages; a quarter of the chunks takes {pages}")

    def _chunk_set(self) -> list[int]:
        """All generated chunks; of a trace from a file, the requested ones."""
        requested = set(itertools.chain.from_iterable(self._trace.requests))
        return list(range(self._sizes.chunks)) if self._is_generated else sorted(requested)

    def _check_fits(self, pool: Pool) -> None:
        pages = sum(pool.pages_for(self._trace.chunk_tokens[chunk]) for chunk in self._chunk_set())
        if pages > pool.free:
            raise ServerError(
                f"the chunks of {self.name} take {pages} pages, and Tessera's pool has {pool.free} left: "
                "raise TESSERA_CHUNK_CACHE_MEMORY"
            )

    async def _passes(self, systems: dict[System, Server], number: int, concurrency: int) -> dict[System, Outcome]:
        """The same queries to each system in turn, each round beginning with another one."""
        queries, first = self._next_queries(), (number - 1) % len(systems)
        outcomes: dict[System, Outcome] = {}
        for system in [*systems][first:] + [*systems][:first]:
            ask = partial(systems[system].ask, namespace=_NAMESPACE)
            outcomes[system] = await closed_loop(ask, queries, concurrency)
            await systems[system].settle()
        await _check(systems, queries, outcomes)
        return outcomes

    def _next_queries(self) -> list[Query]:
        """The queries of a pass, each with a new question."""
        return [self._query(request) for request in itertools.islice(self._requests, self._sizes.requests)]

    def _query(self, request: tuple[int, ...]) -> Query:
        chunks = tuple(self._chunks[chunk] for chunk in request)
        return Query(self._system, chunks, self._texts.text(_QUESTION_TOKENS), _OUTPUT_TOKENS)


async def _check(systems: dict[System, Server], queries: list[Query], outcomes: dict[System, Outcome]) -> None:
    """Raises :class:`DifferentAnswerError` unless Tessera reused chunks, and answers don't depend on its pool."""
    for answer in outcomes["warm"].answers:
        check_report(answer, "hit")
    for answer in outcomes["quarter"].answers:
        if answer.cache.get("mode") != "chunked":
            raise DifferentAnswerError(f"quarter: a request ran as {answer.cache.get('mode')}; not reporting")
    for i, query in enumerate(queries[:_CHECKED_ANSWERS]):
        warm, quarter = (
            Asked(systems[system], outcomes[system].answers[i], _NAMESPACE) for system in ("warm", "quarter")
        )
        await check_same(query, warm, quarter)


def _point(concurrency: int) -> str:
    return f"concurrency {concurrency}"
