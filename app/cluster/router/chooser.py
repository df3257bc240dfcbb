# SPDX-License-Identifier: Apache-2.0
"""Chooses the replicas for a request, the best first."""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from app.cluster.router.directory import Directory
from app.cluster.router.in_flight import InFlight
from app.cluster.router.metrics import RouterMetrics
from app.documents.request_documents import Reading, conversation_of, parse_body, wanted_documents
from replicas.registry import Replica
from replicas.routing import Candidate, Wanted, rank

MOST_ASKED = 64
"""Documents of one request whose holders are looked up: enough of a large ingestion."""
MOST_DECISIONS = 100


@dataclass(frozen=True, slots=True)
class Decision:
    """A routed request, with the tokens of its documents that its replica holds."""

    at: float
    path: str
    replica: str
    documents: int
    wanted_tokens: int
    held_tokens: int
    milliseconds: float


class Asked(NamedTuple):
    """A request's body, and the documents in it; ``since`` is when it was whole, by the performance counter."""

    since: float
    parsed: dict[str, Any] | None = None
    documents: Sequence[Wanted] = ()
    conversation: Sequence[Wanted] = ()
    """Instead of documents."""


class Chooser:
    """Ranks replicas by :func:`replicas.routing.rank` and this router's running requests."""

    def __init__(self, directory: Directory, metrics: RouterMetrics, reading: Reading) -> None:
        self.in_flight = InFlight()
        self.decisions: deque[Decision] = deque(maxlen=MOST_DECISIONS)
        self.directory = directory
        self._metrics = metrics
        self._reading = reading

    def read(self, since: float, path: str, body: bytes) -> Asked:
        """Read a request's body. Call it in a thread if that is long: it may take seconds."""
        if not (parsed := parse_body(path, body)):
            return Asked(since, parsed)
        documents = wanted_documents(path, parsed, self._reading)[:MOST_ASKED]
        return Asked(since, parsed, documents, () if documents else conversation_of(parsed))

    async def choose(self, path: str, asked: Asked, name: str | None) -> list[Replica]:
        """The replicas to try, the best first; only the replica ``name``, if given."""
        replicas = _serving(asked.parsed, self.directory.replicas)
        if name is not None:
            return [replica for replica in replicas if replica.name == name]
        return await self._ranked(path, asked, _answering(replicas))

    async def prefillers(self, path: str, asked: Asked) -> list[Replica]:
        """The replicas that can compute the prompt for another one, the best first."""
        able = [replica for replica in self.directory.replicas if replica.role == "prefill" and replica.hands_over]
        return await self._ranked(path, asked, _serving(asked.parsed, able))

    async def _ranked(self, path: str, asked: Asked, replicas: list[Replica]) -> list[Replica]:
        keys = [document.key for document in asked.documents]
        claims = await self.directory.claims(keys) if len(replicas) > 1 else []
        documents = [replace(each, claims=found) for each, found in zip(asked.documents, claims, strict=False)]
        candidates = [
            Candidate(each.id, each.name, self.in_flight.load(each.url, each.load), each.storages) for each in replicas
        ]
        ranked = rank(documents or asked.conversation, candidates)
        seconds = time.perf_counter() - asked.since
        self._metrics.decision_seconds.observe(seconds)
        if ranked and documents:
            self._note(path, documents, ranked[0].candidate.name, ranked[0].held_tokens, seconds)
        by_id = {replica.id: replica for replica in replicas}
        return [by_id[each.candidate.id] for each in ranked]

    def _note(self, path: str, documents: Sequence[Wanted], name: str, held: int, seconds: float) -> None:
        tokens = sum(
            max((claim.holding.tokens for claim in document.claims), default=document.tokens) for document in documents
        )
        self._metrics.wanted_tokens.inc(tokens)
        self._metrics.held_tokens.inc(held)
        self.decisions.append(Decision(time.time(), path, name, len(documents), tokens, held, round(seconds * 1e3, 3)))


def _answering(replicas: list[Replica]) -> list[Replica]:
    """The replicas that get requests: those that only prefill, where there are no others."""
    return [replica for replica in replicas if replica.role != "prefill"] or replicas


def _serving(parsed: dict[str, Any] | None, replicas: list[Replica]) -> list[Replica]:
    """The replicas that serve the request's model; if none does, all, so that one refuses the request."""
    model = parsed.get("model") if parsed else None
    return [replica for replica in replicas if model in replica.models] or replicas
