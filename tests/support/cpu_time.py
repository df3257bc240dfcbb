# SPDX-License-Identifier: Apache-2.0
"""CPU time of calls, for tests that compare it with that of others."""

import gc
import time
from collections.abc import Callable
from typing import Any


def cpu_seconds(call: Callable[..., Any], *arguments: Any, tries: int = 3) -> float:
    """The least that a call takes; the machine may do something else meanwhile."""
    took = []
    gc.collect()
    gc.disable()  # it runs once in a while, and then through all that other tests have left
    try:
        for _ in range(tries):
            started = time.process_time()
            call(*arguments)
            took.append(time.process_time() - started)
    finally:
        gc.enable()
    return min(took)
