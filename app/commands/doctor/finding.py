# SPDX-License-Identifier: Apache-2.0
"""What a check found."""

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "info", "warn", "FAIL"]
"""``FAIL``: with this, nothing would be reused. ``warn``: it may not be as wanted."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What is so, in one line, and what to do about it, if there is something to do."""

    state: State
    text: str
    fix: str | None = None
