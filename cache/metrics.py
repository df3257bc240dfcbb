# SPDX-License-Identifier: Apache-2.0
"""Counters of one chunk cache since its start."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import Histogram

_SHORT = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 1.0)
_LONG = (5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


def _histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
    return Histogram(name, text, labels, buckets=buckets, registry=None)


TIER_EVENTS = (
    "loaded",
    "stored",
    "skipped",
    "corrupt",
    "unsigned",
    "timeout",
    "late",
    "suspended",
    "load_failed",
    "store_failed",
)


@dataclass(slots=True)
class ChunkCacheMetrics:
    """Monotonic counters, and histograms in seconds; ``app/prometheus.py`` exports them on ``GET /metrics``."""

    lookups: Counter[str] = field(default_factory=Counter)
    """Chunks looked up, by result: hit, filled, waited."""
    requests: Counter[str] = field(default_factory=Counter)
    """Finished requests by mode: chunked, full."""
    full_reasons: Counter[str] = field(default_factory=Counter)
    """Requests with chunks in full attention, by reason."""
    tokens: Counter[str] = field(default_factory=Counter)
    """Prompt tokens of requests with chunks: reused, computed, left_out; and fill_computed by fill requests."""
    fills: Counter[str] = field(default_factory=Counter)
    """Fills by outcome: succeeded, fetched (instead of computed), failed, aborted."""
    handovers: Counter[str] = field(default_factory=Counter)
    """Prompts that another engine had computed, by outcome (:class:`cache.report.Handed`)."""
    fetches: Counter[str] = field(default_factory=Counter)
    """Attempts to get missing segments from other replicas, by outcome: fetched, absent, failed, refused, late."""
    fetched_bytes: int = 0
    tier_events: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Events of tiers, by tier and one of :data:`TIER_EVENTS`."""
    tier_bytes: dict[str, int] = field(default_factory=dict)
    """Bytes in tiers, as of the last transfer."""
    loaded_bytes: Counter[str] = field(default_factory=Counter)
    """Bytes of KV imported, by tier."""
    removals: Counter[str] = field(default_factory=Counter)
    """Detached segments, by reason (:class:`cache.eviction.removal.Removal`)."""
    refused_loads: int = 0
    """Requests whose load a worker refused because a page had another tag."""
    plan_seconds: Histogram = field(
        default_factory=lambda: _histogram("tessera_plan_seconds", "Looking up and leasing a request's chunks", _SHORT)
    )
    fill_seconds: Histogram = field(
        default_factory=lambda: _histogram("tessera_fill_seconds", "A fill request, from its turn to saved", _LONG)
    )
    tier_load_seconds: Histogram = field(
        default_factory=lambda: _histogram("tessera_tier_load_seconds", "Import of a segment, by tier", _LONG, "tier")
    )
    lease_seconds: Histogram = field(
        default_factory=lambda: _histogram("tessera_lease_seconds", "How long requests held their chunks", _LONG)
    )

    def snapshot(self) -> dict[str, Any]:
        """A JSON-ready copy of the counters, for ``GET /v1/cache/stats``."""
        return {
            "lookups": dict(self.lookups),
            "requests": dict(self.requests),
            "full_reasons": dict(self.full_reasons),
            "tokens": dict(self.tokens),
            "fills": dict(self.fills),
            "handovers": dict(self.handovers),
            "fetches": dict(self.fetches),
            "fetched_bytes": self.fetched_bytes,
            "tiers": _nested(self.tier_events),
            "loaded_bytes": dict(self.loaded_bytes),
            "removals": dict(self.removals),
            "refused_loads": self.refused_loads,
        }


def _nested(events: Counter[tuple[str, str]]) -> dict[str, dict[str, int]]:
    nested: dict[str, dict[str, int]] = {}
    for (tier, word), count in events.items():
        nested.setdefault(tier, {})[word] = count
    return nested
