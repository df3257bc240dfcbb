# SPDX-License-Identifier: Apache-2.0
"""The result of a check."""

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "info", "warn", "FAIL"]
"""``FAIL``: nothing would be reused. ``warn``: a possible problem."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A fact in one line, and advice if there is any."""

    state: State
    text: str
    fix: str | None = None
