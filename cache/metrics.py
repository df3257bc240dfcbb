# SPDX-License-Identifier: Apache-2.0
"""Counters of one chunk cache since its start."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class ChunkCacheMetrics:
    """Monotonic counters; :meth:`snapshot` is what ``GET /v1/cache/stats`` shows."""

    lookups: Counter[str] = field(default_factory=Counter)
    """Chunks looked up, by result: hit, filled, waited."""
    requests: Counter[str] = field(default_factory=Counter)
    """Finished requests by mode: chunked, full."""
    full_reasons: Counter[str] = field(default_factory=Counter)
    """Why requests with chunks ran in full attention."""
    tokens: Counter[str] = field(default_factory=Counter)
    """Prompt tokens of requests with chunks: reused, computed; and fill_computed by fill requests."""
    fills: Counter[str] = field(default_factory=Counter)
    """Fill requests by outcome: succeeded, failed, aborted."""
    evicted_chunks: int = 0
    refused_loads: int = 0
    """Loads that a worker refused because a page carried another tag."""

    def snapshot(self) -> dict[str, Any]:
        """A JSON-ready copy."""
        return {
            "lookups": dict(self.lookups),
            "requests": dict(self.requests),
            "full_reasons": dict(self.full_reasons),
            "tokens": dict(self.tokens),
            "fills": dict(self.fills),
            "evicted_chunks": self.evicted_chunks,
            "refused_loads": self.refused_loads,
        }
