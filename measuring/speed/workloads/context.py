# SPDX-License-Identifier: Apache-2.0
"""New questions over contexts of more and more chunks."""

from dataclasses import dataclass
from typing import Any

from measuring.speed.rag import Query
from measuring.speed.samples import Claim, Growth, Ratio, Sample, Value
from measuring.speed.servers import Servers
from measuring.speed.workloads.base import Options, Record, Step, sample
from measuring.speed.workloads.rag_round import measure

_SYSTEM_TOKENS, _CHUNK_TOKENS, _QUESTION_TOKENS = 64, 512, 32


@dataclass(frozen=True, slots=True)
class Sizes:
    """``chunks`` has the number of chunks at each point. Each round takes all points in turn."""

    chunks: tuple[int, ...]
    rounds: int
    max_tokens: int


class Context:
    """Time to first token by length of the context."""

    name = "context"
    title = "new questions over more and more chunks"
    axis = "tokens of context"
    values: tuple[Value, ...] = ("ttft_s",)
    short = Sizes((8,), rounds=2, max_tokens=4)
    long = Sizes((2, 4, 8, 16, 32), rounds=10, max_tokens=4)

    def __init__(self, options: Options) -> None:
        self._sizes = self.long if options.is_long else self.short
        self._texts = options.texts(self.name)
        self._system = self._texts.text(_SYSTEM_TOKENS)

    def claims(self) -> list[Claim]:
        claims: list[Claim] = [
            Ratio(self.name, "4096", "ttft_s", "stock", "warm", at_least=40),
            Ratio(self.name, "4096", "ttft_s", "warm", "exact repeat", at_most=1),
            Ratio(self.name, "4096", "ttft_s", "empty", "stock", at_most=1),
        ]
        if {2, 32} <= set(self._sizes.chunks):
            claims += [
                Growth(self.name, "1024", "16384", "ttft_s", "warm", at_most=8),
                Growth(self.name, "1024", "16384", "ttft_s", "stock", at_least=16),
            ]
        return claims

    def sizes(self) -> dict[str, Any]:
        return {
            "system_tokens": _SYSTEM_TOKENS,
            "chunks": list(self._sizes.chunks),
            "chunk_tokens": _CHUNK_TOKENS,
            "question_tokens": _QUESTION_TOKENS,
            "output_tokens": self._sizes.max_tokens,
            "rounds": self._sizes.rounds,
        }

    def num_steps(self) -> int:
        return (self._sizes.rounds + 1) * len(self._sizes.chunks)

    async def run(self, servers: Servers, record: Record, step: Step) -> None:
        """The first round, number 0, only warms the servers up."""
        for number in range(self._sizes.rounds + 1):
            for chunks in self._sizes.chunks:
                samples = await self._round(servers, number, chunks)
                for each in samples if number else ():
                    record(each)
                step()

    async def _round(self, servers: Servers, number: int, chunks: int) -> list[Sample]:
        texts = self._texts.chunks(chunks, _CHUNK_TOKENS)
        query = Query(self._system, tuple(texts), self._texts.text(_QUESTION_TOKENS), self._sizes.max_tokens)
        answers = await measure(servers, query, self._texts, f"{self.name}-{number}-{chunks}")
        point = str(chunks * _CHUNK_TOKENS)
        return [sample(self.name, point, system, number, answers[system], *self.values) for system in answers]
