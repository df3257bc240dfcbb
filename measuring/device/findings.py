# SPDX-License-Identifier: Apache-2.0
"""What comes of a check.

::

    Finding        it passed
    CheckError     it failed; any other exception means the same, but says less
    SkippedError   it says nothing here
"""

from dataclasses import dataclass, field
from typing import Any

_LONGEST = 600


class CheckError(Exception):
    """Something isn't as it must be; the message says what was seen. ``values`` is as in :class:`Finding`."""

    def __init__(self, message: str, values: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.values = values or {}


class SkippedError(Exception):
    """The check can't be made here; the message says why, and what it would take."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What was measured, in words, and in numbers that JSON can hold."""

    message: str
    values: dict[str, Any] = field(default_factory=dict)


def one_line(error: BaseException) -> str:
    """What an exception says, however many lines it takes for that; its type, where that says more."""
    words = " ".join(str(error).split())
    short = words if len(words) <= _LONGEST else f"{words[:_LONGEST]} …"
    return short if isinstance(error, CheckError | SkippedError) else f"{type(error).__name__}: {short}"
