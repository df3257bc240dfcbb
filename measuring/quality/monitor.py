# SPDX-License-Identifier: Apache-2.0
"""Progress and accuracy of a run, in one line."""

import time
from collections import defaultdict
from datetime import timedelta
from statistics import fmean

from app.modes import in_order
from measuring.quality.metrics import score
from measuring.quality.results import Result


class Monitor:
    """Counts results; :meth:`line` says how it goes."""

    def __init__(self, total: int, refusal: str) -> None:
        self.total = total
        self.done = 0
        self.refused = 0
        self._refusal = refusal
        self._accuracies: dict[str, list[float]] = defaultdict(list)
        self._started, self._done_before = time.monotonic(), 0

    def start(self) -> None:
        """Starts the clock. Results counted before are an earlier run's and don't count for the rate."""
        self._started, self._done_before = time.monotonic(), self.done

    def add(self, result: Result) -> None:
        """Counts one result. The accuracy shown is of answers that ran in the mode asked for."""
        self.done += 1
        self.refused += result.error is not None
        if result.ran_as == result.mode:
            self._accuracies[result.mode].append(score(result.text, result.answers, self._refusal).accuracy)

    def line(self) -> str:
        """For example ``20/90 answers, 2.5/s, 0:00:28 left; right so far: full 90%, shared 80%``."""
        parts = [f"{self.done}/{self.total} answers{self._pace()}"]
        if self._accuracies:
            shares = [f"{mode} {fmean(self._accuracies[mode]):.0%}" for mode in in_order(self._accuracies)]
            parts.append(f"right so far: {', '.join(shares)}")
        if self.refused:
            parts.append(f"{self.refused} refused by the server")
        return "; ".join(parts)

    def _pace(self) -> str:
        done = self.done - self._done_before
        if not done:
            return ""
        rate = done / (time.monotonic() - self._started)
        return f", {rate:.3g}/s, {timedelta(seconds=round((self.total - self.done) / rate))} left"
