# SPDX-License-Identifier: Apache-2.0
"""How far a run is, and how long it has to go."""

import time
from datetime import timedelta


class Monitor:
    """Counts steps, and shows those of the workload that runs."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.done = 0
        self.workload = ""
        self._first_ended = 0.0

    def step(self) -> None:
        """One more is done."""
        self.done += 1
        if self.done == 1:  # before it servers start, which tells nothing of the others
            self._first_ended = time.monotonic()

    def line(self) -> str:
        """For example ``context, 20 of 90 steps, about 0:02:28 left``."""
        parts = [self.workload, f"{self.done} of {self.total} steps"]
        if self.done > 1:
            left_s = (time.monotonic() - self._first_ended) * (self.total - self.done) / (self.done - 1)
            parts.append(f"about {timedelta(seconds=round(left_s))} left")
        return ", ".join(filter(None, parts))
