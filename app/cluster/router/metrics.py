# SPDX-License-Identifier: Apache-2.0
"""Counters of a router, for its ``GET /metrics``."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2)


class RouterMetrics:
    """Metrics of one router, in a Prometheus registry of their own."""

    def __init__(self) -> None:
        self.collected = CollectorRegistry()
        self.requests = Counter(
            "tessera_router_requests",
            "Requests answered, by replica and HTTP status (of a broken stream: broken)",
            ["replica", "status"],
            registry=self.collected,
        )
        self.retries = Counter(
            "tessera_router_retries", "Requests sent to another replica, by reason", ["reason"], registry=self.collected
        )
        self.prefills = Counter(
            "tessera_router_prefills",
            "Prompts computed by a replica that prefills, by outcome",
            ["outcome"],
            registry=self.collected,
        )
        self.wanted_tokens = Counter(
            "tessera_router_wanted_tokens", "Tokens of the documents in requests", registry=self.collected
        )
        self.held_tokens = Counter(
            "tessera_router_held_tokens",
            "Tokens of the documents in requests that the registry said the chosen replica holds",
            registry=self.collected,
        )
        self.replicas = Gauge("tessera_router_replicas", "Replicas that get requests", registry=self.collected)
        self.load = Gauge(
            "tessera_router_load", "Requests of this router under way", ["replica"], registry=self.collected
        )
        self.registry_up = Gauge(
            "tessera_router_registry_up", "Whether the registry answered when last asked", registry=self.collected
        )
        self.registry_errors = Counter(
            "tessera_router_registry_errors", "Queries that the registry did not answer", registry=self.collected
        )
        self.decision_seconds = Histogram(
            "tessera_router_decision_seconds",
            "From a request's last byte to the choice of its replica",
            buckets=_BUCKETS,
            registry=self.collected,
        )
