# SPDX-License-Identifier: Apache-2.0
"""The state of a run, in one line."""

from datetime import timedelta


class Monitor:
    """Counts finished workloads, and the rounds of the current one."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.done = 0
        self._workload = ""
        self._state = ""

    def begin(self, workload: str) -> None:
        """A workload begins."""
        self._workload, self._state = workload, ""

    def after_round(self, number: int, open_claims: int, left_s: float) -> None:
        """A round has ended; its claims may take ``left_s`` seconds more."""
        left = timedelta(seconds=round(max(left_s, 0)))
        self._state = f"round {number}, {open_claims} claims undecided, at most {left} left"

    def end(self) -> None:
        """The workload has ended."""
        self.done += 1
        self._workload, self._state = "", ""

    def line(self) -> str:
        """Progress such as ``0 of 3 workloads, context: round 7, …, at most 0:02:28 left``."""
        current = ": ".join(filter(None, (self._workload, self._state)))
        return ", ".join(filter(None, (f"{self.done} of {self.total} workloads", current)))
