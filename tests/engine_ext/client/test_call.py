# SPDX-License-Identifier: Apache-2.0
"""Calls of vLLM's ``generate``."""

import asyncio
from types import SimpleNamespace

from engine_ext.client.call import EngineCall


class Counting:
    """An engine that counts how many requests began in each turn of the event loop."""

    def __init__(self):
        self.begun = []
        self.turn = 0

    async def generate(self, prompt, params, request_id):
        self.begun.append(self.turn)
        yield prompt

    async def count_turns(self):
        while True:
            self.turn += 1
            await asyncio.sleep(0)


async def test_requests_that_come_together_begin_a_few_at_a_time_and_others_wait_for_no_turn():
    llm = Counting()
    turns = asyncio.create_task(llm.count_turns())

    async def answered(number):
        call = EngineCall(llm, {"number": number}, SimpleNamespace(), "id", {})
        return [output async for output in call.send(call.prompt, call.params)]

    answers = await asyncio.gather(*map(answered, range(200)))
    turns.cancel()
    assert answers == [[{"number": number}] for number in range(200)]
    assert max(map(llm.begun.count, llm.begun)) <= 16
    llm = Counting()
    turns = asyncio.create_task(llm.count_turns())
    for _ in range(50):
        async for _ in EngineCall(llm, {}, SimpleNamespace(), "id", {}).send({}, SimpleNamespace()):
            pass
    turns.cancel()
    assert len(set(llm.begun)) <= 5
