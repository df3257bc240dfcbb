# SPDX-License-Identifier: Apache-2.0
"""New questions over cached chunks, with link tokens and without."""

from dataclasses import dataclass, replace
from typing import Any, Final

from measuring.speed.answers import Asked, DifferentAnswerError, check_prompt, check_report, check_same
from measuring.speed.rag import Answer, LinkContext, Query
from measuring.speed.samples import Claim, Ratio, System, Value
from measuring.speed.servers import STOCK, TESSERA, Servers
from measuring.speed.workloads.base import Options, Record, Step, sample

_SYSTEM_TOKENS, _CHUNK_TOKENS, _QUESTION_TOKENS = 64, 512, 32
_CONTEXTS: Final[dict[System, LinkContext]] = {"linked": "chained", "linked at once": "cached"}


@dataclass(frozen=True, slots=True)
class Sizes:
    """Each round asks one question over so many new chunks."""

    chunks: int
    link_tokens: int
    rounds: int
    max_tokens: int


class Links:
    """What link tokens add to the time to first token."""

    name = "links"
    title = "new questions over cached chunks, with 16 link tokens each"
    axis = "tokens of context"
    values: tuple[Value, ...] = ("ttft_s",)
    short = Sizes(chunks=8, link_tokens=16, rounds=3, max_tokens=4)
    long = Sizes(chunks=8, link_tokens=16, rounds=10, max_tokens=4)

    def __init__(self, options: Options) -> None:
        self._sizes = self.long if options.is_long else self.short
        self._texts = options.texts(self.name)
        self._system = self._texts.text(_SYSTEM_TOKENS)
        self._point = str(self._sizes.chunks * _CHUNK_TOKENS)

    def claims(self) -> list[Claim]:
        return [
            Ratio(self.name, self._point, "ttft_s", "linked", "stock", at_most=0.15),
            Ratio(self.name, self._point, "ttft_s", "linked at once", "stock", at_most=0.15),
            Ratio(self.name, self._point, "ttft_s", "linked", "warm"),
        ]

    def sizes(self) -> dict[str, Any]:
        return {
            "system_tokens": _SYSTEM_TOKENS,
            "chunks": self._sizes.chunks,
            "chunk_tokens": _CHUNK_TOKENS,
            "link_tokens": self._sizes.link_tokens,
            "question_tokens": _QUESTION_TOKENS,
            "output_tokens": self._sizes.max_tokens,
            "rounds": self._sizes.rounds,
        }

    def num_steps(self) -> int:
        return self._sizes.rounds + 1

    async def run(self, servers: Servers, record: Record, step: Step) -> None:
        """The first round, number 0, only warms the servers up."""
        for number in range(self._sizes.rounds + 1):
            answers = await self._round(servers, f"{self.name}-{number}")
            for system, answer in answers.items() if number else ():
                record(sample(self.name, self._point, system, number, answer, *self.values))
            step()

    async def _round(self, servers: Servers, namespace: str) -> dict[System, Answer]:
        texts = tuple(self._texts.chunks(self._sizes.chunks, _CHUNK_TOKENS))
        query = Query(self._system, texts, self._texts.text(_QUESTION_TOKENS), self._sizes.max_tokens)
        stock = await servers.get(STOCK)
        answers: dict[System, Answer] = {"stock": await stock.ask(query)}
        await stock.settle()
        server = await servers.get(TESSERA)
        await server.ingest(replace(query, chunks=tuple(self._texts.shuffled(texts))), namespace)
        answers["warm"] = await server.ask(query, namespace)
        for system, context in _CONTEXTS.items():
            linked = replace(query, link_tokens=self._sizes.link_tokens, link_context=context)
            answers[system] = answer = await server.ask(linked, namespace)
            _check_links(answer, linked)
            repeat = await server.ask(linked, namespace)
            await check_same(linked, Asked(server, answer, namespace), Asked(server, repeat, namespace))
        for system in ("warm", *_CONTEXTS):
            check_report(answers[system], "hit")
            check_prompt(answers["stock"], answers[system])
        await server.clear(namespace)
        await server.settle()
        return answers


def _check_links(answer: Answer, query: Query) -> None:
    """Raises :class:`DifferentAnswerError` unless the query's link tokens were computed, and no chunk."""
    report = answer.report
    links = {"tokens": query.link_tokens, "context": query.link_context}
    computed = query.link_tokens * (len(query.chunks) - 1)
    if report.get("links") != links:
        raise DifferentAnswerError(f"a request ran with links {report.get('links')}, not {links}; not reporting")
    if not computed < report["tokens"]["computed"] < computed + _CHUNK_TOKENS:
        raise DifferentAnswerError(
            f"{report['tokens']['computed']} tokens were computed, not {computed}; not reporting"
        )
