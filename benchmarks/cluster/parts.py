# SPDX-License-Identifier: Apache-2.0
"""The questions asked of the simulation, each a set of runs."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from unittest import mock

import replicas.routing
from benchmarks.cluster.outcome import Outcome
from benchmarks.cluster.router import POLICIES, PolicyName
from benchmarks.cluster.simulation import Setup, Simulation, one_replica
from benchmarks.cluster.workload import Workload

REPLICAS = (2, 4, 8, 16, 32, 64, 128, 256)
DOCUMENTS_PER_REPLICA = 2_000
"""A quarter of them fit into a replica's pool, as in docs/eviction.md."""
CORPORA = (100_000, 1_000_000, 10_000_000)
HOT_SHARE, FAILING, LOAD_TO_SPARE = 0.3, 0.25, 0.5
ROUTERS = (1, 4, 16)
LOAD_TOKENS = (8, 16, 32, 64, 128, 256, 512)
HOME_DISCOUNTS = (0.0, 0.25, 0.5, 0.9)
_SMALL = 16
"""Replicas where their number isn't the question."""
_LEAST_REQUESTS = 8_000


@dataclass(frozen=True, slots=True)
class Scale:
    """How much to run: at most so many replicas, and requests for each of them, as many again to warm up."""

    replicas: int = REPLICAS[-1]
    per_replica: int = 300
    seed: int = 0

    def sizes(self, *wanted: int) -> list[int]:
        """Those that are not too many."""
        return [size for size in wanted if size <= self.replicas]

    def setup(self, replicas: int, documents: int = 0, hot_share: float = 0.0) -> Setup:
        """A cluster of so many replicas; small ones get more requests for each, lest they be few altogether."""
        measured = max(self.per_replica * replicas, self.per_replica * _LEAST_REQUESTS // 300)
        documents = documents or DOCUMENTS_PER_REPLICA * replicas
        return Setup(replicas, Workload(documents, 2 * measured, measured, hot_share, seed=self.seed))


@dataclass(frozen=True, slots=True)
class Row:
    """A run's outcome, and what of its setup the outcome does not tell."""

    outcome: Outcome
    routers: int
    load_tokens: float
    home_discount: float


def scaling(scale: Scale) -> Iterator[Row]:
    """Every policy with more and more replicas; the corpus grows with them."""
    for replicas in scale.sizes(*REPLICAS):
        yield from compared(scale.setup(replicas))


def corpus(scale: Scale) -> Iterator[Row]:
    """More and more documents."""
    for documents in CORPORA:
        yield from compared(scale.setup(scale.replicas, documents), ("rank", "round robin"))


def hot(scale: Scale) -> Iterator[Row]:
    """One topic gets a large share of the requests, from one moment to the next."""
    for replicas in scale.sizes(4, 16, 64, 256):
        yield from compared(scale.setup(replicas, hot_share=HOT_SHARE))


def failures(scale: Scale) -> Iterator[Row]:
    """Some replicas end without a word, and come back empty."""
    for replicas in scale.sizes(8, 64):
        yield from compared(
            replace(scale.setup(replicas), load=LOAD_TO_SPARE, failing=FAILING), ("rank", "round robin")
        )


def routers(scale: Scale) -> Iterator[Row]:
    """The more routers, the less each of them knows."""
    for number in ROUTERS:
        yield from compared(replace(scale.setup(min(_SMALL, scale.replicas)), routers=number), ("rank",))


def prices(scale: Scale) -> Iterator[Row]:
    """Other values of the constants of :mod:`replicas.routing`."""
    setup = scale.setup(min(_SMALL, scale.replicas))
    home, load = replicas.routing.HOME_DISCOUNT, replicas.routing.LOAD_TOKENS
    pairs = [*((tokens, home) for tokens in LOAD_TOKENS), *((load, discount) for discount in HOME_DISCOUNTS)]
    for (tokens, discount), share in itertools.product(pairs, (0.0, HOT_SHARE)):
        with mock.patch.multiple(replicas.routing, LOAD_TOKENS=tokens, HOME_DISCOUNT=discount):
            yield from compared(replace(setup, workload=replace(setup.workload, hot_share=share)), ("rank",))


def compared(setup: Setup, policies: Sequence[PolicyName] = POLICIES) -> Iterator[Row]:
    """A row for each policy, all asked the same at the same times."""
    one = one_replica(setup)
    for policy in policies:
        outcome = Simulation(setup, policy, one).run()
        yield Row(outcome, setup.routers, replicas.routing.LOAD_TOKENS, replicas.routing.HOME_DISCOUNT)


PARTS: dict[str, Callable[[Scale], Iterator[Row]]] = {
    "scaling": scaling,
    "corpus": corpus,
    "hot": hot,
    "failures": failures,
    "routers": routers,
    "prices": prices,
}
