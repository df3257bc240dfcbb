# SPDX-License-Identifier: Apache-2.0
"""The stages of one request, timed for its report and traced as spans."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from engine_ext.client.tracing import Span


class Stages:
    """Times stages of a request whose span is ``span``, from now on."""

    def __init__(self, span: Span) -> None:
        self.timings_ms: dict[str, float] = {"plan": 0.0, "fill": 0.0}
        self._span = span
        self._started = time.perf_counter()

    @contextmanager
    def stage(self, name: str) -> Iterator[Span]:
        """A stage with a span of its own; of stages with the same name the last one's time stays."""
        started = time.perf_counter()
        try:
            with self._span.child(f"tessera.{name}") as span:
                yield span
        finally:
            self.timings_ms[name] = (time.perf_counter() - started) * 1e3

    def elapsed_ms(self) -> float:
        """Time since the request was received."""
        return (time.perf_counter() - self._started) * 1e3
