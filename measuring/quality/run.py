# SPDX-License-Identifier: Apache-2.0
"""Asks questions in modes."""

from collections.abc import Iterable, Iterator, Sequence

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


async def ask(client: TesseraClient, question: Question, mode: str, options: AskOptions) -> Result:
    """The result, also of a request that the server refuses. Raises other kinds of ``ServerError``."""
    try:
        if options.ahead and mode != "full":
            async for _ in client.ingest(question.system, question.chunks):
                pass
        answer = await client.ask(question, mode, options)
        return Result.of_answer(question, mode, answer, await client.judge(question, mode, options))
    except RefusedError as error:
        return Result.of_error(question, mode, str(error))
