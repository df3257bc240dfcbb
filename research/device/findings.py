# SPDX-License-Identifier: Apache-2.0
"""Outcomes of a check: a finding, or an error. Any other exception is a failure too, but says less."""

from dataclasses import dataclass, field
from typing import Any

_LONGEST = 600


class CheckError(Exception):
    """A check failed; the message has the observation. ``values`` is as in :class:`Finding`."""

    def __init__(self, message: str, values: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.values = values or {}


class SkippedError(Exception):
    """The check can't be made here; the message has the reason."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A result, in words, and as JSON values."""

    message: str
    values: dict[str, Any] = field(default_factory=dict)


def one_line(error: BaseException) -> str:
    """An exception's message in one line, with its type unless it is one of these."""
    words = " ".join(str(error).split())
    short = words if len(words) <= _LONGEST else f"{words[:_LONGEST]} …"
    return short if isinstance(error, CheckError | SkippedError) else f"{type(error).__name__}: {short}"
