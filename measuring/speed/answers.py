# SPDX-License-Identifier: Apache-2.0
"""Checks of answers, without which no time is reported."""

from dataclasses import dataclass
from typing import Any, Literal

from measuring.kit.client import Answer, ServerError
from measuring.speed.query import Query
from measuring.speed.servers import Server

_REFUSAL = "not reporting"


class DifferentAnswerError(ServerError):
    """An answer differs from what its mode must give: no time is worth reporting."""


@dataclass(frozen=True, slots=True)
class Asked:
    """An answer, and where it came from."""

    server: Server
    answer: Answer
    namespace: str = "default"


def check_report(answer: Answer, status: Literal["hit", "filled"]) -> None:
    """Raises :class:`DifferentAnswerError` unless chunks were reused, and each came about as ``status`` says."""
    report = answer.cache
    statuses = {str(chunk["status"]) for chunk in report.get("chunks", ())}
    if report.get("mode") != "chunked" or statuses != {status}:
        ran_as = f"{report.get('mode', 'no report')} with chunks {', '.join(sorted(statuses)) or 'none'}"
        reason = f" ({report['reason']})" if report.get("reason") else ""
        raise DifferentAnswerError(f"a request ran as {ran_as}, not all {status}{reason}; {_REFUSAL}")


def check_prompt(one: Answer, other: Answer) -> None:
    """Raises :class:`DifferentAnswerError` unless both systems had as many tokens in the prompt."""
    if one.prompt_tokens != other.prompt_tokens:
        sizes = f"{one.prompt_tokens} and {other.prompt_tokens}"
        raise DifferentAnswerError(f"prompts of the same request were {sizes} tokens long; {_REFUSAL}")


async def check_same(query: Query, one: Asked, other: Asked) -> None:
    """Raises :class:`DifferentAnswerError` unless both answered ``query`` with the same text.

    Answers may part at two tokens that are as likely: then both are asked again, for log probabilities.
    """
    texts = one.answer.text, other.answer.text
    if texts[0] == texts[1]:
        return
    for asked in (one, other):
        tokens = await asked.server.token_logprobs(query, asked.namespace)
        if not _parts_at_tie(tokens, *texts, asked.server.tie):
            raise DifferentAnswerError(
                f"{one.server.name} and {other.server.name} answered differently; {_REFUSAL}: "
                f"{texts[0]!r} and {texts[1]!r}"
            )


def _parts_at_tie(tokens: list[dict[str, Any]], text: str, other: str, tie: float) -> bool:
    """Whether the texts differ first at a token where both continuations are equally likely, but for a ``tie``."""
    same = next((i for i, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), min(len(text), len(other)))
    said = ""
    for token in tokens:
        if len(said) + len(token["token"]) > same:
            one, another = (_logprob(token["top_logprobs"], each, len(said), same) for each in (text, other))
            if one is None or another is None:
                return False
            return said == text[: len(said)] and abs(one - another) <= tie
        said += token["token"]
    return False


def _logprob(candidates: list[dict[str, Any]], text: str, start: int, same: int) -> float | None:
    """Log probability of the likeliest token that continues ``text`` from ``start`` beyond ``same``."""
    fits = (each for each in candidates if text.startswith(each["token"], start) and start + len(each["token"]) > same)
    return max((each["logprob"] for each in fits), default=None)
