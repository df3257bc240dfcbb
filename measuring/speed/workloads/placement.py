# SPDX-License-Identifier: Apache-2.0
"""The same chunks for many clients in little memory, copied or shared in place."""

from functools import partial
from typing import Any, Final

from measuring.speed.answers import DifferentAnswerError, check_report
from measuring.speed.query import Query
from measuring.speed.samples import Claim, Ratio, Sample, System, Value
from measuring.speed.servers import STOCK, TESSERA, Server, Servers
from measuring.speed.workloads.base import Options, Workload
from measuring.speed.workloads.loops import Outcome, closed_loop

_CHUNKS, _SYSTEM_TOKENS, _CHUNK_TOKENS, _QUESTION_TOKENS, _OUTPUT_TOKENS = 8, 64, 512, 32, 16
_CLIENTS, _REQUESTS, _REQUESTS_ALONE = 16, 16, 5
"""Each round has so many requests of one client, and then of many."""
_BLOCK_TOKENS, _CONTEXTS = 32, 3
_ALONE: Final = "one client"
_NAMESPACE: Final = "placement"
_FLAGS: Final[dict[System, tuple[str, tuple[str, ...]]]] = {
    "stock": (STOCK, ()),
    "warm": (TESSERA, ("--chunk-cache-placement", "copy")),
    "in place": ("in-place", ("--chunk-position-strategy", "parallel", "--chunk-cache-placement", "in-place")),
}
"""The name of each system's server, and its own flags."""


class Placement(Workload):
    """One client's time to first token and many clients' throughput, in little KV memory."""

    name = "placement"
    title = f"the same chunks for all clients, KV memory for {_CONTEXTS} contexts"
    axis = "load"

    def __init__(self, options: Options) -> None:
        self._texts = options.texts(self.name)
        self._system = self._texts.text(_SYSTEM_TOKENS)
        self._chunks = self._texts.chunks(_CHUNKS, _CHUNK_TOKENS)
        self._crowd = f"{_CLIENTS} clients"

    def claims(self) -> list[Claim]:
        return [
            Ratio(self.name, _ALONE, "ttft_s", "in place", "warm", at_most=1),
            Ratio(self.name, self._crowd, "requests_per_s", "in place", "warm", at_least=2),
            Ratio(self.name, self._crowd, "requests_per_s", "in place", "stock", at_least=15),
        ]

    def sizes(self) -> dict[str, Any]:
        return {
            "system_tokens": _SYSTEM_TOKENS,
            "chunks": _CHUNKS,
            "chunk_tokens": _CHUNK_TOKENS,
            "question_tokens": _QUESTION_TOKENS,
            "output_tokens": _OUTPUT_TOKENS,
            "block_tokens": _BLOCK_TOKENS,
            "blocks": self._blocks,
            "requests_alone": _REQUESTS_ALONE,
            "clients": _CLIENTS,
            "requests_per_round": _REQUESTS,
        }

    @property
    def _blocks(self) -> int:
        """Blocks for ``_CONTEXTS`` requests with their chunks, prompts and answers."""
        around = 2 * _SYSTEM_TOKENS + 2 * _QUESTION_TOKENS + _OUTPUT_TOKENS
        return _CONTEXTS * -(-(around + _CHUNKS * _CHUNK_TOKENS) // _BLOCK_TOKENS)

    async def prepare(self, servers: Servers) -> None:
        """Starts servers with little memory; the servers of other workloads end."""
        for name in (STOCK, TESSERA):
            await servers.close(name)
        memory = ("--block-size", str(_BLOCK_TOKENS), "--num-gpu-blocks-override", str(self._blocks))
        for system, (name, flags) in _FLAGS.items():
            await self._warm_up(system, await servers.get(name, *memory, "--max-model-len", "8192", *flags))

    async def round(self, servers: Servers, number: int) -> list[Sample]:
        return [
            each
            for system, (name, _) in _FLAGS.items()
            for each in await self._turn(system, await servers.get(name), number)
        ]

    async def finish(self, servers: Servers) -> None:
        for name, _ in _FLAGS.values():
            await servers.close(name)

    async def _warm_up(self, system: System, server: Server) -> None:
        query = self._query()
        if system != "stock":
            await server.ingest(query, _NAMESPACE)
        await closed_loop(partial(server.ask, namespace=_NAMESPACE), [query, self._query()], 1)
        await server.settle()

    async def _turn(self, system: System, server: Server, number: int) -> list[Sample]:
        ask = partial(server.ask, namespace=_NAMESPACE)
        # Of stock vLLM one time to first token is enough: nothing is claimed of it, and it takes long.
        alone = await closed_loop(ask, [self._query() for _ in range(1 if system == "stock" else _REQUESTS_ALONE)], 1)
        crowd = await closed_loop(ask, [self._query() for _ in range(_REQUESTS)], _CLIENTS)
        await server.settle()
        _check(system, [alone, crowd])
        figures: dict[str, dict[Value, float]] = {
            _ALONE: {"ttft_s": alone.median("ttft_s")},
            self._crowd: {"ttft_s": crowd.median("ttft_s"), "requests_per_s": crowd.requests_per_s},
        }
        return [
            Sample(workload=self.name, point=point, system=system, round=number, values=values)
            for point, values in figures.items()
        ]

    def _query(self) -> Query:
        chunks = tuple(self._texts.shuffled(self._chunks))
        return Query(self._system, chunks, self._texts.text(_QUESTION_TOKENS), _OUTPUT_TOKENS)


def _check(system: System, outcomes: list[Outcome]) -> None:
    """Raises :class:`DifferentAnswerError` unless chunks were reused as the system is to."""
    placement = "in-place" if system == "in place" else None
    for answer in (answer for outcome in outcomes for answer in outcome.answers):
        if system == "stock":
            continue
        check_report(answer, "hit")
        if answer.cache.get("placement") != placement:
            raise DifferentAnswerError(f"a request was placed as {answer.cache.get('placement')}; not reporting")
