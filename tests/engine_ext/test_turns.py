# SPDX-License-Identifier: Apache-2.0
"""Turns go round, whoever asks how often."""

import asyncio

import pytest

from engine_ext.chunks.turns import FairTurns
from tests.engine_ext.fake_llm import turns as steps


class Work:
    """Tasks that take a turn each, in the order of `began`, and end when told."""

    def __init__(self, turns: FairTurns) -> None:
        self.turns = turns
        self.began: list[str] = []
        self.may_end = asyncio.Semaphore(0)
        self.tasks: list[asyncio.Task[None]] = []

    def ask(self, owner: str | None, number: int = 1) -> None:
        self.tasks += [asyncio.create_task(self._run(owner)) for _ in range(number)]

    async def _run(self, owner: str | None) -> None:
        async with self.turns.turn(owner):
            self.began.append(owner or "-")
            await self.may_end.acquire()

    async def end(self, number: int) -> str:
        """Ends so many, and tells who has begun until now."""
        for _ in range(number):
            self.may_end.release()
        await steps(20)
        return "".join(self.began)


async def test_who_asks_often_waits_for_others_that_came_later() -> None:
    work = Work(FairTurns(2))
    work.ask("a", 1000)
    await steps(1100)
    work.ask("b", 2)
    work.ask("c")
    assert await work.end(0) == "aa"
    assert await work.end(3) == "aaabc"
    assert await work.end(2) == "aaabcab"
    await work.end(1000)
    await asyncio.wait_for(asyncio.gather(*work.tasks), 30)


async def test_one_that_is_named_leaves_turns_to_others() -> None:
    work = Work(FairTurns(2, most_of_one=1))
    work.ask("a", 3)
    assert await work.end(0) == "a"
    work.ask("b")
    assert await work.end(0) == "ab"
    assert await work.end(4) == "abaa"
    await asyncio.wait_for(asyncio.gather(*work.tasks), 30)
    nobodys = Work(work.turns)
    nobodys.ask(None, 3)
    assert await nobodys.end(0) == "--"
    assert await nobodys.end(3) == "---"


@pytest.mark.parametrize("cancelled", [0, 1, 2])
async def test_who_no_longer_waits_holds_up_nobody(cancelled: int) -> None:
    """Holding the turn, just given it, and waiting for it."""
    work = Work(FairTurns(1))
    work.ask("a", 4)
    await steps(10)
    if cancelled == 1:
        work.may_end.release()
        await steps(1)
    work.tasks[cancelled].cancel()
    await steps(10)
    for _ in range(4):
        await work.end(1)
    await asyncio.wait(work.tasks, timeout=30)
    assert all(task.done() for task in work.tasks)
    work.ask("b")
    assert (await work.end(1))[-1] == "b"


async def test_work_that_nobody_waits_for_any_more_keeps_its_turn() -> None:
    """A thread goes on when its request is aborted: who aborts requests must not have all threads."""
    turns, may_end, began = FairTurns(2, most_of_one=1), asyncio.Event(), list[str]()

    async def work(owner: str) -> str:
        began.append(owner)
        await may_end.wait()
        return owner

    def ask(owner: str) -> asyncio.Task[str]:
        return asyncio.create_task(turns.run(owner, lambda: work(owner)))

    aborted, waiting = ask("a"), ask("a")
    await steps(10)
    aborted.cancel()
    waiting.cancel()
    later = [ask("a"), ask("b")]
    await steps(10)
    assert began == ["a", "b"]
    may_end.set()
    assert await asyncio.gather(*later) == ["a", "b"]
    assert began == ["a", "b", "a"]


async def test_work_may_fail() -> None:
    async def work() -> None:
        raise ValueError("it fails")

    turns = FairTurns(1)
    for _ in range(2):
        with pytest.raises(ValueError, match="it fails"):
            await turns.run("a", work)
