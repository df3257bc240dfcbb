# SPDX-License-Identifier: Apache-2.0
"""Ordinary chat, without documents: the cost of Tessera for those who don't use it."""

from typing import Any, Final

from measuring.kit.client import Answer
from measuring.speed.answers import Asked, check_prompt, check_same
from measuring.speed.query import Query
from measuring.speed.samples import Claim, Ratio, Sample, System, Value
from measuring.speed.servers import STOCK, TESSERA, Servers
from measuring.speed.workloads.base import Options, Workload

_PROMPT_TOKENS, _OUTPUT_TOKENS = 128, 64
_POINT = str(_PROMPT_TOKENS)
_MORE_PROMPTS: Final = 8
"""In each round, answered by one token. The least time to first token counts: noise only adds to it."""


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
        systems: list[tuple[System, str]] = [("stock", STOCK), ("tessera", TESSERA)]
        answers: dict[System, list[Asked]] = {system: [] for system, _ in systems}
        for place, each in enumerate((query, *more)):  # a machine's pace changes within a round
            for system, name in systems if (place + number) % 2 else reversed(systems):
                server = await servers.get(name)
                answers[system].append(Asked(server, await server.ask(each)))
                await server.settle()
        check_prompt(answers["stock"][0].answer, answers["tessera"][0].answer)
        await check_same(query, answers["stock"][0], answers["tessera"][0])
        return [self._sample(system, number, [asked.answer for asked in answers[system]]) for system, _ in systems]

    def _sample(self, system: System, number: int, answers: list[Answer]) -> Sample:
        first_s = min(answer.ttft_s or 0.0 for answer in answers)
        times: dict[Value, float] = {"ttft_s": first_s, "tpot_s": answers[0].tpot_s}
        return Sample(workload=self.name, point=_POINT, system=system, round=number, values=times)
