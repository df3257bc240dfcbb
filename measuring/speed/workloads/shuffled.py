# SPDX-License-Identifier: Apache-2.0
"""The same documents again and again, in new orders: does the gain last?"""

import itertools
from dataclasses import replace
from typing import Any

from measuring.speed.answers import Asked, check_prompt, check_report, check_same
from measuring.speed.rag import Answer, Query
from measuring.speed.samples import Claim, Ratio, Retention, Sample, System
from measuring.speed.servers import STOCK, TESSERA, Servers
from measuring.speed.systems import Server
from measuring.speed.workloads.base import Options, Record, Step, sample

_SYSTEM_TOKENS, _DOCUMENT_TOKENS, _QUESTION_TOKENS, _OUTPUT_TOKENS = 64, 256, 32, 4
_DOCUMENTS, _BATCHES = 14, 5
_WARM = "shuffled-warm"


class Shuffled:
    """Batches of requests, each with its own order of the documents and its own question.

    Batch 0 finds nothing cached, the others find all documents.
    """

    name = "shuffled"
    title = f"{_DOCUMENTS} documents, shuffled anew for each request"
    axis = "batch"

    def __init__(self, options: Options) -> None:
        self._requests = 10 if options.is_long else 1
        self._texts = options.texts(self.name)
        self._system = self._texts.text(_SYSTEM_TOKENS)
        self._numbers = itertools.count()
        self._documents = self._texts.chunks(_DOCUMENTS, _DOCUMENT_TOKENS)

    def claims(self) -> list[Claim]:
        first, last = (Ratio(self.name, _point(batch), "ttft_s", "stock", "warm") for batch in (1, _BATCHES - 1))
        return [first, last, Retention(first, last, at_least=0.95)]

    def sizes(self) -> dict[str, Any]:
        return {
            "system_tokens": _SYSTEM_TOKENS,
            "documents": _DOCUMENTS,
            "document_tokens": _DOCUMENT_TOKENS,
            "question_tokens": _QUESTION_TOKENS,
            "output_tokens": _OUTPUT_TOKENS,
            "batches": _BATCHES,
            "requests_per_batch": self._requests,
        }

    def num_steps(self) -> int:
        return 1 + _BATCHES * self._requests

    async def run(self, servers: Servers, record: Record, step: Step) -> None:
        stock, tessera = await servers.get(STOCK), await servers.get(TESSERA)
        await self._warm_up(stock, tessera)
        step()
        for batch in range(_BATCHES):
            for number in range(self._requests):
                for each in await self._request(stock, tessera, batch, number):
                    record(each)
                step()
        await tessera.clear(_WARM)

    async def _warm_up(self, stock: Server, tessera: Server) -> None:
        """Other documents on both, and the documents themselves into Tessera's cache."""
        others = self._texts.chunks(_DOCUMENTS, _DOCUMENT_TOKENS)
        query = replace(self._query(0, 0), chunks=tuple(others))
        await stock.ask(query)
        await stock.settle()
        await self._ask_empty(tessera, query)
        await tessera.ingest(replace(query, chunks=tuple(self._documents)), _WARM)
        await tessera.settle()

    async def _request(self, stock: Server, tessera: Server, batch: int, number: int) -> list[Sample]:
        query = self._query(batch, number)
        answers: dict[System, Answer] = {"stock": await stock.ask(query)}
        await stock.settle()
        if batch:
            answers["warm"] = await self._ask_warm(
                tessera, query, is_checked=number == 0 and batch in (1, _BATCHES - 1)
            )
        else:
            answers["empty"] = await self._ask_empty(tessera, query)
        await tessera.settle()
        check_prompt(*answers.values())
        return [sample(self.name, _point(batch), system, number, answers[system], "ttft_s") for system in answers]

    async def _ask_warm(self, tessera: Server, query: Query, is_checked: bool) -> Answer:
        """With all documents cached; ``is_checked`` compares the answer with that of an empty cache."""
        answer = await tessera.ask(query, _WARM)
        check_report(answer, "hit")
        if is_checked:
            await self._ask_empty(tessera, query, Asked(tessera, answer, _WARM))
        return answer

    async def _ask_empty(self, tessera: Server, query: Query, same_as: Asked | None = None) -> Answer:
        """With nothing cached, before and after; nor has vLLM's prefix cache anything of a new namespace."""
        namespace = f"{self.name}-empty-{next(self._numbers)}"
        answer = await tessera.ask(query, namespace)
        check_report(answer, "filled")
        if same_as:
            await check_same(query, same_as, Asked(tessera, answer, namespace))
        await tessera.clear(namespace)
        return answer

    def _query(self, batch: int, number: int) -> Query:
        """In each batch, request ``i`` begins with document ``i``, and goes on as no request before it.

        So stock vLLM's prefix cache, too, finds the same in each batch after the first: one document.
        """
        first, second = (self._documents[i % _DOCUMENTS] for i in (number, number + 1 + batch))
        others = [document for document in self._documents if document not in (first, second)]
        chunks = (first, second, *self._texts.shuffled(others))
        return Query(self._system, chunks, self._texts.text(_QUESTION_TOKENS), _OUTPUT_TOKENS)


def _point(batch: int) -> str:
    return f"batch {batch}"
