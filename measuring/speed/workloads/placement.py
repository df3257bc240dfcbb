# SPDX-License-Identifier: Apache-2.0
"""The same chunks for many clients: copied, shared in place, or attended to in the pool."""

from functools import partial
from typing import Any, Final

from measuring.kit.client import Answer
from measuring.speed.answers import DifferentAnswerError, check_report
from measuring.speed.query import Query
from measuring.speed.samples import Claim, Ratio, Sample, System
from measuring.speed.servers import STOCK, TESSERA, Server, Servers
from measuring.speed.workloads.base import Options, Workload
from measuring.speed.workloads.loops import closed_loop

_CHUNKS, _SYSTEM_TOKENS, _CHUNK_TOKENS, _QUESTION_TOKENS, _BLOCK_TOKENS = 8, 64, 512, 32, 32
_REQUESTS, _REQUESTS_ALONE = 16, 5
"""Each round has so many requests of many clients, and before them of one."""
_ALONE, _NAMESPACE = "one client", "placement"
_FLAGS: Final[dict[System, tuple[str, tuple[str, ...]]]] = {
    "stock": (STOCK, ()),
    "warm": (TESSERA, ("--chunk-cache-placement", "copy")),
    "in place": ("in-place", ("--chunk-mode", "parallel", "--chunk-cache-placement", "in-place")),
    "attend": ("attend", ("--chunk-cache-placement", "attend")),
}
"""Each system's server, and its own flags."""
_PLACED: Final[dict[System, str | None]] = {"warm": None, "in place": "in-place", "attend": "attend"}
"""The placement that reports name."""


class Placement(Workload):
    """One client's time to first token and many clients' throughput, in little KV memory."""

    name = "placement"
    title = "the same chunks for all clients, KV memory for three contexts"
    axis = "load"
    systems: tuple[System, ...] = ("stock", "warm", "in place", "attend")
    clients, contexts, output_tokens = 16, 3, 16

    def __init__(self, options: Options) -> None:
        self._texts = options.texts(self.name)
        self._system = self._texts.text(_SYSTEM_TOKENS)
        self._chunks = self._texts.chunks(_CHUNKS, _CHUNK_TOKENS)
        self._crowd = f"{self.clients} clients"

    def claims(self) -> list[Claim]:
        return [
            Ratio(self.name, _ALONE, "ttft_s", "in place", "warm", at_most=1),
            Ratio(self.name, _ALONE, "ttft_s", "attend", "warm", at_most=1.1),
            Ratio(self.name, self._crowd, "requests_per_s", "in place", "warm", at_least=2),
            Ratio(self.name, self._crowd, "requests_per_s", "attend", "warm", at_least=2),
            Ratio(self.name, self._crowd, "requests_per_s", "in place", "stock", at_least=15),
        ]

    def sizes(self) -> dict[str, Any]:
        return {
            "system_tokens": _SYSTEM_TOKENS,
            "chunks": _CHUNKS,
            "chunk_tokens": _CHUNK_TOKENS,
            "question_tokens": _QUESTION_TOKENS,
            "output_tokens": self.output_tokens,
            "block_tokens": _BLOCK_TOKENS,
            "blocks": self._blocks,
            "requests_alone": _REQUESTS_ALONE,
            "clients": self.clients,
            "requests_per_round": _REQUESTS,
        }

    @property
    def _blocks(self) -> int:
        """Blocks for ``contexts`` requests with their chunks, prompts and answers."""
        around = 2 * _SYSTEM_TOKENS + 2 * _QUESTION_TOKENS + self.output_tokens
        return self.contexts * -(-(around + _CHUNKS * _CHUNK_TOKENS) // _BLOCK_TOKENS)

    async def prepare(self, servers: Servers) -> None:
        """Starts servers with this memory; the servers of other workloads end."""
        for name in (STOCK, TESSERA):
            await servers.close(name)
        memory = ("--block-size", str(_BLOCK_TOKENS), "--num-gpu-blocks-override", str(self._blocks))
        for system in self.systems:
            name, flags = _FLAGS[system]
            server = await servers.get(name, *memory, "--max-model-len", "8192", *flags)
            query = self._query()
            if system != "stock":
                await server.ingest(query, _NAMESPACE)
            await closed_loop(partial(server.ask, namespace=_NAMESPACE), [query, self._query()], 1)
            await server.settle()

    async def round(self, servers: Servers, number: int) -> list[Sample]:
        return [
            each
            for system in self.systems
            for each in await self._turn(system, await servers.get(_FLAGS[system][0]), number)
        ]

    async def finish(self, servers: Servers) -> None:
        for system in self.systems:
            await servers.close(_FLAGS[system][0])

    async def _turn(self, system: System, server: Server, number: int) -> list[Sample]:
        ask = partial(server.ask, namespace=_NAMESPACE)
        # Of stock vLLM one time to first token is enough: nothing is claimed of it, and it takes long.
        alone = await closed_loop(ask, [self._query() for _ in range(1 if system == "stock" else _REQUESTS_ALONE)], 1)
        crowd = await closed_loop(ask, [self._query() for _ in range(_REQUESTS)], self.clients)
        await server.settle()
        if system != "stock":
            _check(_PLACED[system], [*alone.answers, *crowd.answers])
        return [
            Sample(workload=self.name, point=point, system=system, round=number, values=outcome.values)
            for point, outcome in ((_ALONE, alone), (self._crowd, crowd))
        ]

    def _query(self) -> Query:
        chunks = tuple(self._texts.shuffled(self._chunks))
        return Query(self._system, chunks, self._texts.text(_QUESTION_TOKENS), self.output_tokens)


class Decoding(Placement):
    """Many clients' time per output token and throughput, in KV memory for all of them."""

    name = "decoding"
    title = "the same chunks for all clients, KV memory for all"
    clients, contexts, output_tokens = 8, 8, 64

    def claims(self) -> list[Claim]:
        return [
            Ratio(self.name, self._crowd, "tpot_s", "attend", "warm", at_most=0.7),
            Ratio(self.name, self._crowd, "requests_per_s", "in place", "stock"),
            Ratio(self.name, self._crowd, "requests_per_s", "attend", "stock"),
        ]


def _check(placement: str | None, answers: list[Answer]) -> None:
    """Raises :class:`DifferentAnswerError` unless chunks were reused with this placement."""
    for answer in answers:
        check_report(answer, "hit")
        if answer.cache.get("placement") != placement:
            raise DifferentAnswerError(f"a request was placed as {answer.cache.get('placement')}; not reporting")
