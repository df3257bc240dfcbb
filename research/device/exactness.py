# SPDX-License-Identifier: Apache-2.0
"""The check of whole answers: they must not depend on the state of the cache.

Answers of the engine are compared with answers of the same engine that had to compute more of the same: chunks cached
and missing, in two orders (with `shared` and `parallel`, where order matters to memory only), and one chunk alone,
which is ordinary attention, with mode `full`, which ties the comparisons to stock vLLM. Rotations are the business of
`kernels` and `engine`: a missing chunk's keys are turned as a cached one's are. Last, replacing a chunk must change the
answer, or the comparisons prove nothing.

Compared are log probabilities of greedy answers, as long as both have the same tokens before; `tolerance` allows for
sums in another order in the dtype.
"""

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, Literal

from measuring.kit.texts import Texts
from measuring.speed.query import Mode, Query
from measuring.speed.servers import Server
from research.device.context import Context
from research.device.findings import CheckError, Finding

STRATEGIES = ("shared", "parallel", "offset")
_CHUNK_TOKENS = (100, 37, 260, 64, 17)
_LONGEST = _CHUNK_TOKENS.index(max(_CHUNK_TOKENS))
_LONE_CHUNK_TOKENS = 300
_SYSTEM_TOKENS, _QUESTION_TOKENS, _STEPS = 40, 24, 8
_ORDERS = 4
_TOP_LOGPROBS = 5

Token = dict[str, Any]
"""A token with its log probability and its likeliest alternatives, in OpenAI's format."""
Status = Literal["hit", "filled"]


async def exactness(context: Context) -> Finding:
    """Raises :class:`CheckError` if two answers that must agree don't."""
    engine, tolerance = context.engine, context.engine.options.tolerance
    server = await engine.server()
    await server.pool()  # the chunk cache must be on
    differences: list[tuple[float, str]] = []
    replaced: list[float] = []
    for strategy in STRATEGIES:
        asker = _Asker(server, engine.texts(f"exactness {strategy}"), strategy)
        async for pair, one, other in asker.pairs():
            differences.append((difference(one, other), f"{strategy}: {pair}"))
        replaced.append(await asker.replaced())
    (worst, where), least = max(differences), min(replaced)
    values = {"largest_difference": worst, "replaced": replaced, "comparisons": differences, "tolerance": tolerance}
    if not worst <= tolerance:
        raise CheckError(f"{where}: log probabilities differ by {worst:.2g}, more than {tolerance:g}", values)
    change = f"replacing a chunk changes log probabilities by {least:.2g}"
    if not least > tolerance:
        raise CheckError(f"{change} only: with this model the comparisons prove nothing", values)
    message = (
        f"{len(differences)} comparisons: log probabilities differ by at most {worst:.2g} ({tolerance:g} is allowed)"
    )
    return Finding(f"{message}; {change}", values)


class _Asker:
    """The requests of one position strategy."""

    def __init__(self, server: Server, texts: Texts, strategy: str) -> None:
        self._server = server
        self._texts = texts
        self._strategy = strategy
        self._kept = f"{strategy} kept"
        self._system = texts.text(_SYSTEM_TOKENS)
        self._chunks = [texts.chunk(tokens) for tokens in _CHUNK_TOKENS]

    async def pairs(self) -> AsyncIterator[tuple[str, list[Token], list[Token]]]:
        """Pairs of answers that must agree, each with a label."""
        await self._ask(self._query(self._chunks), self._kept, "filled")
        for number in range(_ORDERS):
            query = self._query(self._texts.shuffled(self._chunks))
            cached = await self._ask(query, self._kept, "hit")
            missing = await self._ask(query, f"{self._strategy} {number}", "filled")
            yield "cached in another order, and missing", cached, missing
        some = self._query([*self._chunks[1:], self._texts.chunk(_CHUNK_TOKENS[0])])
        partly = await self._ask(some, self._kept, "hit", "hit", "hit", "hit", "filled")
        yield "partly cached, and missing", partly, await self._ask(some, f"{self._strategy} partly", "filled")
        if self._strategy != "offset":
            query = self._query(self._chunks)
            other = replace(query, chunks=tuple(self._texts.shuffled(self._chunks)))
            one = await self._ask(query, self._kept, "hit")
            yield "two orders of cached chunks", one, await self._ask(other, self._kept, "hit")
        async for pair in self._lone_chunk():
            yield pair

    async def _lone_chunk(self) -> AsyncIterator[tuple[str, list[Token], list[Token]]]:
        chunk = self._texts.chunk(_LONE_CHUNK_TOKENS)
        statuses: tuple[Status, ...] = ("filled", "hit")
        for status in statuses:
            query = self._query([chunk])
            chunked = await self._ask(query, self._kept, status)
            yield f"one chunk {status}, and full attention", chunked, await self._ask_full(query)

    async def replaced(self) -> float:
        """Difference that another text in place of the longest chunk makes."""
        query = self._query(self._chunks)
        chunks = list(self._chunks)
        chunks[_LONGEST] = self._texts.chunk(_CHUNK_TOKENS[_LONGEST])
        one = await self._ask(query, self._kept, "hit")
        other = await self._ask(replace(query, chunks=tuple(chunks)), f"{self._strategy} replaced", "filled")
        return difference(one, other)

    def _query(self, chunks: list[str]) -> Query:
        """With a new question."""
        return Query(self._system, tuple(chunks), self._texts.text(_QUESTION_TOKENS), _STEPS)

    async def _ask(self, query: Query, namespace: str, *statuses: Status) -> list[Token]:
        """The answer, with chunks of these ``statuses``; a single status holds for all chunks."""
        tokens, report = await self._answer(query, namespace, "chunked")
        expected = list(statuses) * (len(query.chunks) if len(statuses) == 1 else 1)
        seen = [chunk["status"] for chunk in report["chunks"]]
        if report["mode"] != "chunked" or seen != expected:
            raise CheckError(f"a request ran {report['mode']} with chunks {seen} where {expected} was due")
        return tokens

    async def _ask_full(self, query: Query) -> list[Token]:
        # In a namespace of its own, so that vLLM's prefix cache doesn't have what was computed for the chunk.
        tokens, report = await self._answer(query, f"{self._strategy} full", "full")
        if report["mode"] != "full":
            raise CheckError(f"a request in mode full ran {report['mode']}")
        return tokens

    async def _answer(self, query: Query, namespace: str, mode: Mode) -> tuple[list[Token], dict[str, Any]]:
        body = query.tessera_body(namespace, mode)
        for name in ("stream", "stream_options"):
            del body[name]
        body["cache"]["position_strategy"] = self._strategy
        # As ids, since two tokens may have the same text.
        body |= {"logprobs": True, "top_logprobs": _TOP_LOGPROBS, "return_tokens_as_token_ids": True}
        answer = await self._server.post("/v1/rag/chat", body)
        return answer["choices"][0]["logprobs"]["content"], answer["cache"]


def difference(one: list[Token], other: list[Token]) -> float:
    """Largest difference of log probabilities, up to the first token that differs."""
    worst = 0.0
    for a, b in zip(one, other, strict=True):
        worst = max(worst, _gap(a, b), _gap(b, a))
        if a["token"] != b["token"]:
            break
    return worst


def _gap(chosen: Token, other: Token) -> float:
    """Difference of a token's log probability; a lower bound if missing in ``other``."""
    candidates = {each["token"]: float(each["logprob"]) for each in (*other["top_logprobs"], other)}
    if chosen["token"] in candidates:
        return abs(candidates[chosen["token"]] - float(chosen["logprob"]))
    return max(0.0, float(chosen["logprob"]) - min(candidates.values()))
