# SPDX-License-Identifier: Apache-2.0
"""The clock by which chunks expire: wall time that never jumps."""

import time
from typing import Final

_OFFSET: Final = time.time() - time.monotonic()


def now() -> float:
    """Seconds since the epoch: the system's clock when the process started, plus the time since.

    Setting the system's clock does not change it: durations stay right, dates as wrong as at the start.
    """
    return _OFFSET + time.monotonic()
