# SPDX-License-Identifier: Apache-2.0
"""Requests to a simulated cluster: which documents each takes, and how long its answer is.

Documents belong to topics, whose popularity follows Zipf's law (exponent 1). A request takes some documents of one
topic, each as likely as the others, and at times one of another topic. Nothing exists of a document until somebody asks
for it, so ten millions cost no more than their topics' popularity does: four megabytes.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.eviction import Chunk
from replicas.registry import DocumentKey

TOPIC_DOCUMENTS = 20
OF_ONE_TOPIC = 4
OTHER_SHARE = 0.3
"""Of requests, those that take a document of another topic as well."""
QUESTION_TOKENS = 64
_LENGTHS = 1 << 16

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Workload:
    """What to ask for. Of ``requests``, the first ``warm_up`` fill the caches and are not measured.

    ``hot_share`` of those that are measured are about one topic that was like any other before.
    """

    documents: int
    requests: int
    warm_up: int
    hot_share: float = 0.0
    output_tokens: int = 64
    """Of an answer, on average; distributed geometrically."""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Arrivals:
    """The requests: ``documents`` is [requests, OF_ONE_TOPIC + 1], the last one -1 for none.

    ``gaps`` are exponential with mean 1, to be divided by requests per second. ``routers`` are uniform in [0, 1).
    """

    documents: Integers
    output_tokens: Integers
    gaps: Floats
    routers: Floats

    def __len__(self) -> int:
        return len(self.documents)


class Corpus:
    """The documents that somebody asked for; lengths are lognormal around 400 tokens, within 64 and 2048."""

    def __init__(self, seed: int) -> None:
        drawn = np.random.default_rng([seed, 1]).lognormal(6.0, 0.7, _LENGTHS)
        self._tokens: list[int] = np.clip(drawn, 64, 2048).round().astype(int).tolist()
        self._chunks: dict[int, Chunk] = {}

    def __len__(self) -> int:
        return len(self._chunks)

    def chunks(self, numbers: Integers) -> list[Chunk]:
        """The documents of one row of :attr:`Arrivals.documents`."""
        return [self._chunk(number) for number in numbers.tolist() if number >= 0]

    def _chunk(self, number: int) -> Chunk:
        if (chunk := self._chunks.get(number)) is None:
            chunk = self._chunks[number] = Chunk(number, self._tokens[number % _LENGTHS])
        return chunk


def key_of(chunk: Chunk) -> DocumentKey:
    """The name by which registry and routers know a document."""
    return DocumentKey(chunk.key.to_bytes(16, "big"))


def make_arrivals(workload: Workload) -> Arrivals:
    """The same workload gives the same requests."""
    rng = np.random.default_rng([workload.seed, 0])
    n, topics = workload.requests, max(workload.documents // TOPIC_DOCUMENTS, 1)
    topic = _zipf(rng, topics, n)
    is_hot = rng.random(n) < workload.hot_share
    is_hot[: workload.warm_up] = False
    topic[is_hot] = topics // 2
    picked = rng.random((n, TOPIC_DOCUMENTS)).argpartition(OF_ONE_TOPIC, axis=1)[:, :OF_ONE_TOPIC]
    other = _zipf(rng, topics, n) * TOPIC_DOCUMENTS + rng.integers(TOPIC_DOCUMENTS, size=n)
    documents = np.column_stack([topic[:, None] * TOPIC_DOCUMENTS + picked, other])
    is_known = (documents[:, :-1] == documents[:, -1:]).any(axis=1)
    documents[is_known | (rng.random(n) >= OTHER_SHARE), -1] = -1
    outputs = rng.geometric(1 / workload.output_tokens, n)
    return Arrivals(documents, outputs, rng.exponential(size=n), rng.random(n))


def _zipf(rng: np.random.Generator, topics: int, n: int) -> Integers:
    sums = np.cumsum(1 / np.arange(1, topics + 1))
    drawn: Integers = np.searchsorted(sums, rng.random(n) * sums[-1])
    return drawn
