# SPDX-License-Identifier: Apache-2.0
"""One run: replicas, routers and requests put together."""

import random
import time
from dataclasses import dataclass, field

import numpy as np

from benchmarks.cluster.clock import Clock
from benchmarks.cluster.outcome import PARTS, Loads, Outcome, part_of, parts_of
from benchmarks.cluster.registry import SimulatedRegistry, Traffic
from benchmarks.cluster.replica import EngineModel, Request, SimulatedReplica
from benchmarks.cluster.router import PolicyName, Router, make_policy
from benchmarks.cluster.workload import Corpus, Workload, make_arrivals
from benchmarks.eviction import PAGE_TOKENS, Pool
from cache.eviction import make_policy as make_eviction

SAMPLE_S = 1.0
"""How often loads are taken."""
WARM_UP_SLOWER = 2
"""How many times slower than afterwards requests come while caches are cold."""


@dataclass(frozen=True, slots=True)
class Setup:
    """A cluster, and what it is asked.

    ``load`` is a share of the requests that it could answer if all its pools were one. ``failing`` is the share of
    replicas that end without a word after a third of the time measured, and come back, empty, after two thirds.
    """

    replicas: int
    workload: Workload
    engine: EngineModel = field(default_factory=EngineModel)
    routers: int = 4
    load: float = 0.7
    failing: float = 0.0


@dataclass(frozen=True, slots=True)
class OneReplica:
    """What one pool with all replicas' memory would find, asked the same; no time passes there."""

    hit_rate: float
    missing_tokens: float
    """Of a request, on average."""


def one_replica(setup: Setup) -> OneReplica:
    """The hit rate to compare with, and to choose the rate of requests by."""
    workload = setup.workload
    arrivals, corpus = make_arrivals(workload), Corpus(workload.seed)
    pool = Pool(setup.replicas * setup.engine.pool_tokens // PAGE_TOKENS, make_eviction("s3fifo"))
    requests = [corpus.chunks(row) for row in arrivals.documents]
    missing = [sum(chunk.tokens for chunk in pool.request(chunks)) for chunks in requests]
    wanted = sum(chunk.tokens for chunks in requests[workload.warm_up :] for chunk in chunks)
    absent = sum(missing[workload.warm_up :])
    return OneReplica(1 - absent / wanted, absent / (workload.requests - workload.warm_up))


class Simulation:
    """One policy in one cluster. ``requests`` has each that has arrived, ``living`` the replicas by id."""

    def __init__(self, setup: Setup, policy: PolicyName, one: OneReplica) -> None:
        self.requests: list[Request] = []
        self.living: dict[str, SimulatedReplica] = {}
        self.clock = Clock()
        self.registry = SimulatedRegistry(self.clock, takes_claims=policy == "rank")
        self._setup, self._policy, self._one = setup, policy, one
        self._arrivals, self._corpus = make_arrivals(setup.workload), Corpus(setup.workload.seed)
        rate = setup.engine.requests_per_s(one.missing_tokens, setup.workload.output_tokens)
        self._requests_per_s = setup.load * setup.replicas * rate
        gaps = self._arrivals.gaps / self._requests_per_s
        gaps[: setup.workload.warm_up] *= WARM_UP_SLOWER
        self._times: list[float] = np.cumsum(gaps).tolist()
        self._from_s, self._until_s = self._times[setup.workload.warm_up], self._times[-1]
        self._routers = [self._make_router(number) for number in range(setup.routers)]
        self._sender: dict[Request, Router] = {}
        self._num_finished = self._num_interrupted = 0
        self._started: list[SimulatedReplica] = []
        self._loads = Loads()
        self._busy_s = 0.0
        self._traffic, self._lookups, self._claims = Traffic(), Traffic(), (0, 0)

    def run(self) -> Outcome:
        """Until every request has been answered."""
        began = time.process_time()
        self._start(self._setup.replicas)
        for number, router in enumerate(self._routers):
            router.start(number / len(self._routers), self._goes_on)
        self.clock.at(self._times[0], self._arrive)
        self.clock.at(self._from_s, self._begin_to_measure)
        if failing := round(self._setup.failing * self._setup.replicas):
            part_s = (self._until_s - self._from_s) / PARTS
            self.clock.at(self._from_s + part_s, self._fail, failing)
            self.clock.at(self._from_s + 2 * part_s, self._start, failing)
        self.clock.run()
        return self._outcome(time.process_time() - began)

    def _make_router(self, number: int) -> Router:
        rng = random.Random(f"{self._setup.workload.seed} {number}")
        return Router(self.clock, self.registry, make_policy(self._policy, self.registry, rng), self._deliver)

    def _start(self, replicas: int) -> None:
        """Starts the first so many replicas by name; ids are always new."""
        for number in range(replicas):
            id, name = f"{len(self._started):012x}", f"replica-{number}"
            replica = SimulatedReplica(id, name, self._setup.engine, self.clock, self.registry, self._finished)
            self._started.append(replica)
            self.living[id] = replica
            replica.start(self._goes_on)

    def _fail(self, replicas: int) -> None:
        for failed in self._started[:replicas]:
            del self.living[failed.id]
            for request in failed.fail():
                self._num_interrupted += request.first_token_at >= 0
                self._sender[request].lost(failed.id)
                self._sender[request].send(request)

    def _goes_on(self) -> bool:
        return self._num_finished < len(self._times)

    def _arrive(self) -> None:
        number = len(self.requests)
        chunks = self._corpus.chunks(self._arrivals.documents[number])
        request = Request(self.clock.now, chunks, int(self._arrivals.output_tokens[number]))
        self.requests.append(request)
        router = self._sender[request] = self._routers[int(self._arrivals.routers[number] * len(self._routers))]
        router.send(request)
        if len(self.requests) < len(self._times):
            self.clock.at(self._times[number + 1], self._arrive)
        else:
            self._end_to_measure()

    def _deliver(self, id: str, request: Request) -> bool:
        if (replica := self.living.get(id)) is not None:
            replica.submit(request)
        return replica is not None

    def _finished(self, request: Request) -> None:
        self._num_finished += 1
        self._sender.pop(request).finished(request)

    def _begin_to_measure(self) -> None:
        self.registry.forget_traffic()
        self._busy_s = -sum(replica.busy_s for replica in self._started)
        self._take_loads()

    def _take_loads(self) -> None:
        if self.clock.now < self._until_s:
            self._loads.take(self.living.values())
            self.clock.at(self.clock.now + SAMPLE_S, self._take_loads)

    def _end_to_measure(self) -> None:
        self._busy_s += sum(replica.busy_s for replica in self._started)
        self._traffic, self._lookups = self.registry.forget_traffic()
        self._claims = self.registry.num_claims()

    def _outcome(self, cpu_s: float) -> Outcome:
        setup = self._setup
        measured = self.requests[setup.workload.warm_up :]
        whole, n = part_of(measured), len(measured)
        return Outcome(
            policy=self._policy,
            replicas=setup.replicas,
            documents=setup.workload.documents,
            hot_share=setup.workload.hot_share,
            failing=setup.failing,
            requests=n,
            requests_per_s=self._requests_per_s,
            hit_rate=whole.hit_rate,
            hit_rate_of_one=self._one.hit_rate,
            balance=self._loads.balance,
            balance_now=self._loads.balance_now,
            busy=self._busy_s / (self._until_s - self._from_s) / setup.replicas,
            ttft_mean_s=whole.ttft_mean_s,
            ttft_p95_s=whole.ttft_p95_s,
            commands=self._traffic.commands / n,
            round_trips=self._traffic.round_trips / n,
            lookup_commands=self._lookups.commands / n,
            lookup_round_trips=self._lookups.round_trips / n,
            claims=self._claims[0],
            claims_of_living=self._claims[1],
            sent_again=sum(request.sendings - 1 for request in self.requests),
            interrupted=self._num_interrupted,
            distinct_documents=len(self._corpus),
            cpu_s=cpu_s,
            parts=parts_of(measured, self._from_s, self._until_s),
        )
