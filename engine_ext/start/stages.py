# SPDX-License-Identifier: Apache-2.0
"""Stages of an engine's start, found in vLLM's log: its processes tell nothing else until they are ready."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from engine_ext.start.vllm_log import log_file
from machine.followed import followed
from machine.progress import Progress, say

LOADING: Final = "loading the weights"
WARMING: Final = "compiling and warming up"
CHECKING: Final = "self-check"
_ORDER: Final = (LOADING, WARMING, CHECKING)
STAGES: Final = {
    "Starting to load model": LOADING,
    "Loading model from scratch": LOADING,
    "Loading weights took": WARMING,
    "Model loading took": WARMING,
}
"""Words of vLLM's log at each stage's begin. A version that words them otherwise shows fewer stages."""


class StartStages:
    """Passes each stage on once, in order: all workers log the same, and logs are read late."""

    def __init__(self, begin: Callable[[str], None]) -> None:
        self._begin = begin
        self._lock = threading.Lock()
        self._reached = -1

    def read(self, line: str) -> None:
        """Begins the stage that a line of vLLM's log tells of."""
        for words, stage in STAGES.items():
            if words in line:
                self.begin(stage)

    def begin(self, stage: str) -> None:
        """Begins a stage, unless it or a later one has begun."""
        with self._lock:
            if _ORDER.index(stage) > self._reached:
                self._reached = _ORDER.index(stage)
                self._begin(stage)


@contextmanager
def told_stages(shown: Progress) -> Iterator[Callable[[str], None]]:
    """Shows the stages that vLLM's log tells of; yields a function for those that it doesn't."""
    stages, log = StartStages(shown.begin), log_file()
    if log is None:
        yield stages.begin
        return
    say(f"vLLM's log is in {log}; tessera serve --log-level info shows it at the terminal")
    with followed(log, stages.read):
        yield stages.begin
