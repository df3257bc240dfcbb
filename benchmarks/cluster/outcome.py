# SPDX-License-Identifier: Apache-2.0
"""What came of one run."""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.cluster.replica import Request, SimulatedReplica
from benchmarks.statistics import p95

PARTS = 3
"""Of the time that is measured: with failures, they are before, while and after replicas are away."""


@dataclass(frozen=True, slots=True)
class Part:
    """Requests that arrived in one part of the time measured; seconds are those from arrival to the first token."""

    hit_rate: float
    ttft_mean_s: float
    ttft_p95_s: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """One policy in one cluster, over the requests that were measured.

    Hit rates are shares of the documents' tokens; ``hit_rate_of_one`` is that of one replica with all pools' memory.
    ``balance`` is the load of the replica that had most, averaged over time, against the mean of all; ``balance_now``
    the mean of that ratio taken every second. ``busy`` is the share of time in which replicas computed prompts.
    ``commands`` and ``round_trips`` are those of Redis per request, all of them and those that look claims up.
    ``sent_again`` counts attempts beyond the first, ``interrupted`` answers that had begun when their replica ended.
    ``claims`` are those in the registry at the end. ``cpu_s`` is what the simulation itself took.
    """

    policy: str
    replicas: int
    documents: int
    hot_share: float
    failing: float
    requests: int
    requests_per_s: float
    hit_rate: float
    hit_rate_of_one: float
    balance: float
    balance_now: float
    busy: float
    ttft_mean_s: float
    ttft_p95_s: float
    commands: float
    round_trips: float
    lookup_commands: float
    lookup_round_trips: float
    claims: int
    claims_of_living: int
    sent_again: int
    interrupted: int
    distinct_documents: int
    cpu_s: float
    parts: tuple[Part, ...]


class Loads:
    """Loads of replicas, taken at steady intervals."""

    def __init__(self) -> None:
        self._by_name: defaultdict[str, list[int]] = defaultdict(list)
        self._ratios: list[float] = []

    def take(self, replicas: Iterable[SimulatedReplica]) -> None:
        """Notes what each has to do now."""
        loads = {replica.name: replica.load for replica in replicas}
        for name, load in loads.items():
            self._by_name[name].append(load)
        if any(loads.values()):
            self._ratios.append(max(loads.values()) / statistics.fmean(loads.values()))

    @property
    def balance(self) -> float:
        """Of each replica's mean over time, the most against the mean; 1 if nobody ever had anything to do."""
        means = [statistics.fmean(loads) for loads in self._by_name.values()]
        return max(means) / statistics.fmean(means) if any(means) else 1.0

    @property
    def balance_now(self) -> float:
        """The mean over time of the most against the mean."""
        return statistics.fmean(self._ratios) if self._ratios else 1.0


def part_of(requests: Sequence[Request]) -> Part:
    """Of at least one request that has been answered."""
    times = [request.first_token_at - request.at for request in requests]
    missing, wanted = (sum(tokens) for tokens in zip(*((r.missing_tokens, r.tokens) for r in requests), strict=True))
    return Part(1 - missing / wanted, statistics.fmean(times), p95(times))


def parts_of(requests: Sequence[Request], from_s: float, until_s: float) -> tuple[Part, ...]:
    """The same of each part of the time; fewer if in one nothing arrived."""
    edges = np.linspace(from_s, until_s, PARTS + 1)[1:-1]
    groups: list[list[Request]] = [[] for _ in range(PARTS)]
    for request, part in zip(requests, np.searchsorted(edges, [request.at for request in requests]), strict=True):
        groups[part].append(request)
    return tuple(part_of(group) for group in groups if group)
