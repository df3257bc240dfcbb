# SPDX-License-Identifier: Apache-2.0
"""Counters of a router, for its ``GET /metrics``."""

from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2)


class RouterMetrics:
    """Metrics of one router, in a Prometheus registry of their own."""

    def __init__(self) -> None:
        self.collected = CollectorRegistry()
        self._requests = Counter(
            "tessera_router_requests",
            "Requests answered, by replica and HTTP status (of a broken stream: broken)",
            ["replica", "status"],
            registry=self.collected,
        )
        self._retries = Counter(
            "tessera_router_retries", "Requests sent to another replica, by reason", ["reason"], registry=self.collected
        )
        self._prefills = Counter(
            "tessera_router_prefills",
            "Prompts computed by a replica that prefills, by outcome",
            ["outcome"],
            registry=self.collected,
        )
        self._wanted = Counter(
            "tessera_router_wanted_tokens", "Tokens of the documents in requests", registry=self.collected
        )
        self._held = Counter(
            "tessera_router_held_tokens",
            "Tokens of the documents in requests that the registry said the chosen replica holds",
            registry=self.collected,
        )
        self._replicas = Gauge("tessera_router_replicas", "Replicas that get requests", registry=self.collected)
        self._load = Gauge(
            "tessera_router_load", "Requests of this router under way", ["replica"], registry=self.collected
        )
        self._registry_up = Gauge(
            "tessera_router_registry_up", "Whether the registry answered when last asked", registry=self.collected
        )
        self._registry_errors = Counter(
            "tessera_router_registry_errors", "Queries that the registry did not answer", registry=self.collected
        )
        self._decision_seconds = Histogram(
            "tessera_router_decision_seconds",
            "From a request's last byte to the choice of its replica",
            buckets=_BUCKETS,
            registry=self.collected,
        )

    def answered(self, replica: str, status: str) -> None:
        """Counts an answer; ``status`` is its HTTP status, or ``broken``."""
        self._requests.labels(replica, status).inc()

    def retried(self, reason: str) -> None:
        """Counts a request that another replica gets."""
        self._retries.labels(reason).inc()

    def prefilled(self, outcome: str) -> None:
        """Counts a prompt that a replica was asked to compute: handed_over or failed."""
        self._prefills.labels(outcome).inc()

    def decided(self, seconds: float) -> None:
        """Observes the time that one choice took."""
        self._decision_seconds.observe(seconds)

    def sent(self, wanted_tokens: int, held_tokens: int) -> None:
        """Counts a request's documents, and the share that its replica holds."""
        self._wanted.inc(wanted_tokens)
        self._held.inc(held_tokens)

    def listed(self, num_replicas: int) -> None:
        """Sets the number of replicas that get requests."""
        self._replicas.set(num_replicas)

    def registry_answered(self) -> None:
        """Notes that the registry is up."""
        self._registry_up.set(1)

    def registry_lost(self) -> None:
        """Counts a question that the registry did not answer."""
        self._registry_up.set(0)
        self._registry_errors.inc()

    @contextmanager
    def under_way(self, replica: str) -> Iterator[None]:
        """Counts a request to a replica as long as the context lasts."""
        load = self._load.labels(replica)
        load.inc()
        try:
            yield
        finally:
            load.dec()
