# SPDX-License-Identifier: Apache-2.0
"""Asks every question in every mode, a few at a time."""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence

from measuring.kit.client import RefusedError
from measuring.quality.client import AskOptions, TesseraClient
from measuring.quality.questions.questions import Question
from measuring.quality.results import Key, Result

Job = tuple[Question, str]


def jobs(questions: Iterable[Question], modes: Sequence[str], answered: set[Key]) -> Iterator[Job]:
    """Questions and modes without an answer. A question's modes follow each other: noise of the machine meets all.

    Each question begins with another mode than the one before: of the modes that reuse chunks, the first has to have
    them computed, and the next finds them cached.
    """
    for i, question in enumerate(questions):
        first = i % len(modes)
        for mode in (*modes[first:], *modes[:first]):
            if (question.id, mode) not in answered:
                yield question, mode


async def ask_all(
    pending: Iterator[Job],
    client: TesseraClient,
    options: AskOptions,
    keep: Callable[[Result], None],
    concurrency: int = 1,
) -> None:
    """Runs the ``pending`` jobs, ``concurrency`` at a time, with each result to ``keep``.

    A request that the server refuses has a result too. Raises the first other ``ServerError``, and asks no more.
    """

    async def work() -> None:
        for question, mode in pending:
            keep(await _ask(client, question, mode, options))

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(work())
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def _ask(client: TesseraClient, question: Question, mode: str, options: AskOptions) -> Result:
    try:
        if options.ahead and mode != "full":
            async for _ in client.ingest(question.system, question.chunks):
                pass
        answer = await client.ask(question, mode, options)
        return Result.of_answer(question, mode, answer, await client.judge(question, mode, options))
    except RefusedError as error:
        return Result.of_error(question, mode, str(error))
