# SPDX-License-Identifier: Apache-2.0
"""Ordinary chat, without documents: the cost of Tessera for those who don't use it."""

from typing import Any, Final

from measuring.speed.answers import Asked, check_prompt, check_same
from measuring.speed.query import Query
from measuring.speed.samples import Claim, Ratio, Sample, System, Value
from measuring.speed.servers import STOCK, TESSERA, Servers
from measuring.speed.workloads.base import Options, Workload

_PROMPT_TOKENS, _OUTPUT_TOKENS = 128, 64
_POINT = str(_PROMPT_TOKENS)
_MORE_PROMPTS: Final = 8
"""Of each system in each round, answered by one token. The least time to first token counts: noise only adds to it."""


class Chat(Workload):
    """Times of new prompts on both systems, which take turns at being first."""

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
        more = [Query("", (), self._texts.text(_PROMPT_TOKENS), 1) for _ in range(_MORE_PROMPTS)]
        order: list[tuple[System, str]] = [("stock", STOCK), ("tessera", TESSERA)]
        answers: dict[System, Asked] = {}
        samples = []
        for system, name in order if number % 2 else reversed(order):
            server = await servers.get(name)
            answer, *others = [await server.ask(each) for each in (query, *more)]
            await server.settle()
            answers[system] = Asked(server, answer)
            first_s = min(each.ttft_s or 0.0 for each in (answer, *others))
            times: dict[Value, float] = {"ttft_s": first_s, "tpot_s": answer.tpot_s}
            samples.append(Sample(workload=self.name, point=_POINT, system=system, round=number, values=times))
        check_prompt(answers["stock"].answer, answers["tessera"].answer)
        await check_same(query, answers["stock"], answers["tessera"])
        return samples
