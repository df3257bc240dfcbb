# SPDX-License-Identifier: Apache-2.0
"""Ordinary chat, without documents: the cost of Tessera for those who don't use it."""

from typing import Any

from measuring.speed.answers import Asked, check_prompt, check_same
from measuring.speed.query import Query
from measuring.speed.samples import Claim, Ratio, Sample, System
from measuring.speed.servers import STOCK, TESSERA, Servers
from measuring.speed.workloads.base import Options, Workload, sample

_PROMPT_TOKENS, _OUTPUT_TOKENS = 128, 64
_POINT = str(_PROMPT_TOKENS)


class Chat(Workload):
    """Times of a new prompt on both systems, which take turns at being first."""

    name = "chat"
    title = "ordinary chat, without documents"
    axis = "tokens of the prompt"

    def __init__(self, options: Options) -> None:
        self._texts = options.texts(self.name)

    def claims(self) -> list[Claim]:
        return [
            Ratio(self.name, _POINT, "ttft_s", "tessera", "stock", at_most=1.03),
            Ratio(self.name, _POINT, "tpot_s", "tessera", "stock", at_most=1.03),
        ]

    def sizes(self) -> dict[str, Any]:
        return {"prompt_tokens": _PROMPT_TOKENS, "output_tokens": _OUTPUT_TOKENS}

    async def round(self, servers: Servers, number: int) -> list[Sample]:
        query = Query("", (), self._texts.text(_PROMPT_TOKENS), _OUTPUT_TOKENS)
        order: list[tuple[System, str]] = [("stock", STOCK), ("tessera", TESSERA)]
        answers: dict[System, Asked] = {}
        for system, name in order if number % 2 else reversed(order):
            server = await servers.get(name)
            answers[system] = Asked(server, await server.ask(query))
            await server.settle()
        check_prompt(answers["stock"].answer, answers["tessera"].answer)
        await check_same(query, answers["stock"], answers["tessera"])
        return [
            sample(self.name, _POINT, system, number, asked.answer, "ttft_s", "tpot_s")
            for system, asked in answers.items()
        ]
