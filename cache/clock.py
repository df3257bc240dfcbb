# SPDX-License-Identifier: Apache-2.0
"""The time by which chunks expire: a wall clock that nobody sets."""

import time
from typing import Final

_OFFSET: Final = time.time() - time.monotonic()


def now() -> float:
    """Seconds since the epoch, as the system's clock showed them when the process started, and counted from then on.

    When that clock is set, this one goes on: durations are right, and dates as wrong as they were at the start.
    """
    return _OFFSET + time.monotonic()
