# SPDX-License-Identifier: Apache-2.0
"""New questions over contexts of more and more chunks."""

from dataclasses import replace
from typing import Any

from measuring.kit.client import Answer
from measuring.speed.answers import Asked, check_prompt, check_report, check_same
from measuring.speed.query import Query
from measuring.speed.samples import Claim, Growth, Ratio, Sample, System
from measuring.speed.servers import STOCK, TESSERA, Servers
from measuring.speed.workloads.base import Options, Workload, sample

CHUNK_TOKENS = 512
_SYSTEM_TOKENS, _QUESTION_TOKENS, _OUTPUT_TOKENS = 64, 32, 4
_LEAST_GAINS, _MOST_OF_HITS = {"4096": 20.0, "8192": 28.0}, {"4096": 0.8}
"""Bounds by tokens of context."""


class Context(Workload):
    """Time to first token by length of the context. Each round takes all points in turn."""

    name = "context"
    title = "new questions over more and more chunks"
    axis = "tokens of context"
    short: tuple[int, ...] = (8,)
    long: tuple[int, ...] = (2, 4, 8, 16, 32)

    def __init__(self, options: Options) -> None:
        default = self.long if options.is_long else self.short
        self._numbers = tuple(tokens // CHUNK_TOKENS for tokens in options.context_tokens) or default
        self._texts = options.texts(self.name)
        self._system = self._texts.text(_SYSTEM_TOKENS)

    def claims(self) -> list[Claim]:
        claims: list[Claim] = []
        for point in (str(number * CHUNK_TOKENS) for number in self._numbers):
            claims += [
                Ratio(self.name, point, "ttft_s", "stock", "warm", at_least=_LEAST_GAINS.get(point)),
                Ratio(self.name, point, "ttft_s", "warm", "prefix hit", at_most=_MOST_OF_HITS.get(point)),
                Ratio(self.name, point, "ttft_s", "empty", "stock", at_most=1 if point == "4096" else None),
            ]
        if {2, 32} <= set(self._numbers):
            claims += [
                Growth(self.name, "1024", "16384", "ttft_s", "warm", at_most=8),
                Growth(self.name, "1024", "16384", "ttft_s", "stock", at_least=16),
            ]
        return claims

    def sizes(self) -> dict[str, Any]:
        return {
            "system_tokens": _SYSTEM_TOKENS,
            "chunks": list(self._numbers),
            "chunk_tokens": CHUNK_TOKENS,
            "question_tokens": _QUESTION_TOKENS,
            "output_tokens": _OUTPUT_TOKENS,
        }

    async def round(self, servers: Servers, number: int) -> list[Sample]:
        return [each for chunks in self._numbers for each in await self._point(servers, number, chunks)]

    async def _point(self, servers: Servers, number: int, chunks: int) -> list[Sample]:
        texts = self._texts.chunks(chunks, CHUNK_TOKENS)
        query = Query(self._system, tuple(texts), self._texts.text(_QUESTION_TOKENS), _OUTPUT_TOKENS)
        stock = await self._ask_stock(servers, query)
        answers = {**stock, **await self._ask_tessera(servers, query, f"{self.name}-{number}-{chunks}")}
        check_prompt(answers["stock"], answers["warm"])
        point = str(chunks * CHUNK_TOKENS)
        return [sample(self.name, point, system, number, answers[system], "ttft_s") for system in answers]

    async def _ask_stock(self, servers: Servers, query: Query) -> dict[System, Answer]:
        server = await servers.get(STOCK)
        stock = await server.ask(query)
        hit = await server.ask(replace(query, question=self._texts.text(_QUESTION_TOKENS)))
        await server.settle()
        return {"stock": stock, "prefix hit": hit}

    async def _ask_tessera(self, servers: Servers, query: Query, namespace: str) -> dict[System, Answer]:
        """Asks with cached chunks, computed in another order than the query's, and without any."""
        server = await servers.get(TESSERA)
        ahead, fresh = f"{namespace}-ahead", f"{namespace}-fresh"
        await server.ingest(replace(query, chunks=tuple(self._texts.shuffled(query.chunks))), ahead)
        warm = await server.ask(query, ahead)
        empty = await server.ask(query, fresh)
        check_report(warm, "hit")
        check_report(empty, "filled")
        await check_same(query, Asked(server, warm, ahead), Asked(server, empty, fresh))
        for each in (ahead, fresh):
            await server.clear(each)
        await server.settle()
        return {"warm": warm, "empty": empty}
