# SPDX-License-Identifier: Apache-2.0
"""How long :func:`replicas.routing.rank` itself takes."""

import itertools
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

from replicas.registry import Claim, DocumentKey, Holding, Tier
from replicas.routing import Candidate, Wanted, rank

DOCUMENTS = 10
CANDIDATES = (8, 64, 256)
HELD_BY = (0, 1, 4)
"""Candidates that hold a document, each."""
_ROUNDS = 50


@dataclass(frozen=True, slots=True)
class Speed:
    """Median milliseconds of one choice among ``candidates`` for :data:`DOCUMENTS` documents."""

    candidates: int
    held_by: int
    rank_ms: float


def speeds() -> Iterator[Speed]:
    """Measured one after the other, on one core."""
    for candidates, held_by in itertools.product(CANDIDATES, HELD_BY):
        rng = random.Random(f"{candidates} {held_by}")
        replicas = [Candidate(f"{i:012x}", f"replica-{i}", rng.randrange(10)) for i in range(candidates)]
        times = [_milliseconds(_wanted(rng, replicas, held_by), replicas) for _ in range(_ROUNDS)]
        yield Speed(candidates, held_by, statistics.median(times))


def _wanted(rng: random.Random, replicas: list[Candidate], held_by: int) -> list[Wanted]:
    holding = Holding(Tier.DEVICE, 512, 512)
    return [
        Wanted(DocumentKey(rng.randbytes(16)), 512, [Claim(each.id, holding) for each in rng.sample(replicas, held_by)])
        for _ in range(DOCUMENTS)
    ]


def _milliseconds(documents: list[Wanted], replicas: list[Candidate]) -> float:
    started = time.perf_counter()
    rank(documents, replicas)
    return (time.perf_counter() - started) * 1e3
